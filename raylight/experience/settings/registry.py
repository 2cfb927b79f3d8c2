"""Decorators by which users add advantage estimators and policy losses to verl's.

A settings object stores the functions that it names (`PolicySettings`), so that they reach the ranks with it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TypeVar

from raylight.errors import ConfigError
from raylight.experience.settings.advantages import ADVANTAGES, USER_BASELINES, BaselineKind
from raylight.experience.settings.losses import LOSSES

Function = TypeVar("Function", bound=Callable[..., object])


def advantage_estimator(
    name: str, *, baseline_kind: BaselineKind | None = None
) -> Callable[[Function], Function]:
    """Register the decorated function as the advantage estimator that `adv_estimator=name` selects.

    The function receives, by keyword, the following arguments if it has a parameter for them:

    - token_level_rewards: float tensor of shape (rollouts, tokens). The tokens are the sampled ones of a
      rollout, one call after the other. The final reward is on the last token, a turn reward on the last
      token of the call before it.
    - response_mask: float tensor of the same shape, 0 after the end of a rollout.
    - index: array of group names, one per rollout.
    - values: the critic's values, of the same shape; this parameter requires `critic=CriticSettings(...)`.
    - reward_baselines: float tensor of shape (rollouts,), the rewards of greedy rollouts of the same tasks.
    - gamma, lam, norm_adv_by_std_in_grpo: the settings of these names (the last is `norm_adv_by_std`).
    - config: verl's AlgoConfig with the same three settings.

    It returns advantages of that shape, or a tuple of advantages and returns (the critic's targets). It runs
    on every rank with the whole batch, so it must be deterministic.

    Args:
        baseline_kind: "group" drops rollouts whose group has no other scored rollout and skips steps in which
            no group has different rewards; "batch" skips steps in which all rewards are equal; "greedy" adds
            a greedy rollout of each task, whose rewards are `reward_baselines`; "none" drops and skips
            nothing. None chooses "greedy" for a function with a parameter `reward_baselines`, else "none".

    Raises:
        ConfigError: the name is taken, the function has a parameter that is not in the list, or
            `reward_baselines` is missing for "greedy" or does not fit another kind.
    """

    def register(function: Function) -> Function:
        takes_baselines = "reward_baselines" in inspect.signature(function).parameters
        kind = baseline_kind or ("greedy" if takes_baselines else "none")
        if takes_baselines != (kind == "greedy"):
            raise ConfigError(
                f"the advantage estimator {name!r} has baseline_kind={kind!r} and "
                f"{'a' if takes_baselines else 'no'} parameter reward_baselines; baseline_kind='greedy' and "
                "this parameter need each other"
            )
        ADVANTAGES.register(name, function)
        USER_BASELINES[name] = kind
        return function

    return register


def policy_loss(name: str) -> Callable[[Function], Function]:
    """Register the decorated function as the policy loss that `loss_mode=name` chooses.

    The function may have these parameters, which are passed by keyword:

    - log_prob, old_log_prob: float tensors of shape (rows, tokens), of the policy that is trained and the one
      that sampled.
    - advantages, response_mask: tensors of the same shape; the mask is 1 for sampled tokens.
    - config: verl's ActorConfig, with the settings of the algorithm (`clip_ratio_low`, ...).

    It returns the loss of each token, in that shape. The caller applies the mask, importance weights and the
    mean over the batch (`loss_agg_mode`), so that they are right for any number of ranks and micro-batches.

    Raises:
        ConfigError: the name is taken, or the function has another parameter.
    """

    def register(function: Function) -> Function:
        LOSSES.register(name, function)
        return function

    return register


def select_arguments(function: Callable[..., object], arguments: dict[str, object]) -> dict[str, object]:
    """Return the arguments that the function has a parameter for."""
    parameters = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in parameters}
