"""Toy algorithm: GRPO whose advantage is 1 for the best rollouts of a group and -1 for the others."""

from typing import Any, Literal

from pydantic import Field

import raylight as rl


@rl.advantage_estimator("best_of_group", baseline_kind="group")
def best_of_group(token_level_rewards: Any, response_mask: Any, index: Any) -> Any:
    """Return 1 for each token of a group's best rollouts and -1 for all others, shape (rollouts, tokens)."""
    rewards = token_level_rewards.sum(-1).tolist()
    best = {group: max(r for r, g in zip(rewards, index, strict=True) if g == group) for group in index}
    signs = [1.0 if reward == best[group] else -1.0 for reward, group in zip(rewards, index, strict=True)]
    return response_mask * response_mask.new_tensor(signs)[:, None]


class BestOfGroup(rl.GRPO):
    """GRPO with `best_of_group` advantages."""

    adv_estimator: Literal["best_of_group"] = "best_of_group"  # type: ignore[assignment]
    group_size: int = Field(default=4, ge=2)
