"""The greedy rollouts that ReMax compares others with."""

from __future__ import annotations

from collections.abc import Callable

from raylight.errors import GreedyError
from raylight.experience.batch import group_of
from raylight.experience.turn_rewards import emitted_before_final
from raylight.types import GREEDY, GREEDY_BELOW, FinishedRollout


def baselines_of(
    finished: list[FinishedRollout], reward_of: Callable[[FinishedRollout], float | None], turn_rewards: bool
) -> dict[str, float]:
    """By group, the reward of its greedy rollout, where it has one.

    Args:
        turn_rewards: whether rewards before the final one count too.

    Raises:
        GreedyError: a rollout that should have been greedy was not.
    """
    baselines: dict[str, float] = {}
    for item in finished:
        if not item.rollout.metadata.get(GREEDY):
            continue
        _must_be_greedy(item)
        if (reward := reward_of(item)) is not None:
            turns = emitted_before_final(item) if turn_rewards else []
            baselines[group_of(item)] = reward + sum(value for _, value in turns)
    return baselines


def _must_be_greedy(item: FinishedRollout) -> None:
    for call in item.generations:
        temperature = call.sampling.get("temperature", 1.0)
        if temperature >= GREEDY_BELOW:
            raise GreedyError(
                f"ReMax compares with a greedy rollout, but the agent called the model at temperature {temperature:g} in one; it "
                "must pass on what its model says, as in create(..., **llm.sampling_parameters), and no temperature of its own"
            )
