"""Rewards of finished rollouts: final rewards, turn rewards, and the greedy baselines of ReMax."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from raylight.errors import GreedyError, RewardError
from raylight.experience.trajectory import CallPosition
from raylight.semconv import GRADE_SPAN_ID
from raylight.traces.rewards import get_reward_value
from raylight.types import GREEDY, GREEDY_BELOW, FinishedRollout, Span


@dataclass(frozen=True, slots=True)
class TurnReward:
    """A reward emitted before the final one, assigned to the last call before it."""

    value: float
    rollout: int
    """Index of the rollout in the batch."""
    row: int | None
    """Index of the call's row in the batch (in the rollout, before a batch is built); None if it was left
    out."""
    token: int
    """Index of the call's last token in the row."""


def effective_reward(item: FinishedRollout, failure_reward: float | None) -> float | None:
    """Return a rollout's own reward, `failure_reward` if its agent failed, or None to leave it out.

    It is left out if it has no reward, or if the infrastructure failed.
    """
    if item.rollout.status == "succeeded":
        return item.reward
    failure = item.rollout.failure
    return None if failure is None or failure.kind in ("infrastructure", "cancelled") else failure_reward


def group_key(item: FinishedRollout) -> str:
    """Return the name of a rollout's group. A rollout without a group forms its own."""
    return item.rollout.group_id or item.rollout.rollout_id


def is_informative(
    group: list[FinishedRollout],
    reward_of: Callable[[FinishedRollout], float | None],
    turn_rewards: bool,
    parts_of: Callable[[FinishedRollout], tuple[float, ...] | None] = lambda item: None,
) -> bool:
    """Return True if the rewards of a group's rollouts that called the model are not all equal.

    Args:
        turn_rewards: add the rewards that were emitted before the final one.
        parts_of: named rewards that are compared instead; None for all rollouts if only the reward counts.
    """
    compared = {
        parts_of(item)
        or math.fsum([reward, *(value for _, value in turn_reward_spans(item) if turn_rewards)])
        for item in group
        if item.generations and (reward := reward_of(item)) is not None
    }
    return len(compared) > 1


def named_parts(
    item: FinishedRollout, names: Sequence[str], failure_reward: float | None
) -> tuple[float, ...] | None:
    """Return the rewards of these names; None to leave the rollout out.

    A rollout whose agent failed has `failure_reward` for each.

    Raises:
        RewardError: the rollout has rewards, and lacks one of these names.
    """
    reward = effective_reward(item, failure_reward)
    if reward is None:
        return None
    if item.rollout.status != "succeeded":
        return (reward,) * len(names)
    if missing := [name for name in names if name not in item.rewards]:
        raise RewardError(
            f"rollout {item.rollout.rollout_id} has the rewards {', '.join(item.rewards)}, and lacks "
            f"{', '.join(missing)}, which reward_weights names; return all of them, as in "
            f"{{{', '.join(f'{name!r}: 1.0' for name in names)}}}"
        )
    return tuple(item.rewards[name] for name in names)


def turn_reward_spans(item: FinishedRollout) -> list[tuple[Span, float]]:
    """Return the rewards that a rollout emitted before the final one, with their spans.

    A rollout that did not succeed has no final reward, so all of its rewards are returned. A grade replaces
    the final reward.
    """
    emitted = [
        (span, value)
        for span in item.spans
        if span.span_id != GRADE_SPAN_ID and (value := get_reward_value(span)) is not None
    ]
    return emitted[:-1] if item.rollout.status == "succeeded" else emitted


def assign_turn_rewards(item: FinishedRollout, calls: Sequence[CallPosition]) -> list[TurnReward]:
    """Assign each reward emitted before the final one to the last call that had ended by then.

    A reward emitted before the end of any call is assigned to the first call.

    Args:
        calls: positions of the trained calls; at least one.
    """
    by_end = sorted(calls, key=lambda call: call.end_time)
    turns = []
    for span, value in turn_reward_spans(item):
        ended = [call for call in by_end if span.start_time is None or call.end_time <= span.start_time]
        call = ended[-1] if ended else by_end[0]
        turns.append(TurnReward(value, 0, call.row, call.last_token))
    return turns


def greedy_baselines(
    finished: list[FinishedRollout], reward_of: Callable[[FinishedRollout], float | None], turn_rewards: bool
) -> dict[str, float]:
    """Return the reward of each group's greedy rollout, the baseline of ReMax.

    See https://arxiv.org/abs/2310.10505. Groups without a greedy rollout are missing in the result.

    Args:
        turn_rewards: add the rewards emitted before the final one.

    Raises:
        GreedyError: a rollout that should have been greedy was sampled.
    """
    baselines: dict[str, float] = {}
    for item in finished:
        if not item.rollout.metadata.get(GREEDY):
            continue
        _check_greedy(item)
        if (reward := reward_of(item)) is not None:
            turns = turn_reward_spans(item) if turn_rewards else []
            baselines[group_key(item)] = reward + sum(value for _, value in turns)
    return baselines


def _check_greedy(item: FinishedRollout) -> None:
    for call in item.generations:
        temperature = call.sampling.get("temperature", 1.0)
        if temperature >= GREEDY_BELOW:
            raise GreedyError(
                f"the greedy rollout {item.rollout.rollout_id}, which ReMax uses as a baseline, called the "
                f"model at temperature {temperature:g}; pass the sampling parameters of the LLM in the "
                "agent, as in create(..., **llm.sampling_parameters), and set no temperature of your own"
            )
