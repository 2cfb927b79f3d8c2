"""Turns of rollouts: trained calls with their states and rewards, for estimators that credit turns."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raylight.experience.settings.advantages import TurnGroups
from raylight.experience.trajectories.reward_rules import RewardRules
from raylight.experience.trajectories.trajectory import Trajectories
from raylight.semconv import CALL_ID, STATE_KEY
from raylight.types import FinishedRollout, Generation, IntArray, Span
from raylight.types.images import compared_ids


@dataclass(frozen=True, slots=True)
class CreditedTurn:
    """A trained call of a rollout. The turns of a rollout are in the order in which their calls began."""

    rollout: int
    """Index of the rollout in the batch."""
    row: int | None
    """Index of the call's row in the batch (in the rollout, before a batch is built); None if it was left
    out."""
    token: int
    """Index of the call's last token in the row."""
    state: str
    """Name of the state; turns of a group with equal names are compared."""
    reward: float
    """Sum of the turn rewards of the call, and for the last call the final reward."""


def build_turns(
    item: FinishedRollout, trajectories: Trajectories, rules: RewardRules, reward: float, groups: TurnGroups
) -> list[CreditedTurn]:
    """Return the turns of a rollout.

    Args:
        trajectories: rows of its trained calls.
        reward: final reward.
    """
    calls, rewards = trajectories.calls, rules.rewards_of_calls(item, trajectories.calls, reward)
    if groups == "turn":
        states = {call.key.call_id: str(number) for number, call in enumerate(calls)}
    else:
        states = _states(item.generations, item.spans)
    return [
        CreditedTurn(0, position.row, position.last_token, states[position.call_id], math.fsum(earned))
        for position, earned in zip(trajectories.positions, rewards, strict=True)
    ]


def _states(calls: Sequence[Generation], spans: Sequence[Span]) -> dict[str, str]:
    """Return the name of the state of each call that was not cut off, by call id.

    Args:
        calls: of a rollout, or of an agent's part of one.
        spans: of the whole rollout, whose other calls have keys too.
    """
    named = [
        (span.start_time or 0.0, str(span.attributes[STATE_KEY]))
        for span in spans
        if STATE_KEY in span.attributes
    ]
    named.sort(key=lambda pair: pair[0])
    states: dict[str, str] = {}
    used, before = 0, None
    for call in _in_order(calls, spans):
        if isinstance(call, Span):
            used = _count_until(named, used, call.start_time or 0.0)
            continue
        if call.finish_reason == "aborted":  # the client sends it again, in the same state
            continue
        first, used = used, _count_until(named, used, call.start_time)
        if used > first:
            state = f"key {named[used - 1][1]}"
        elif before is not None and _is_choice_of(before, call):
            state = states[before.key.call_id]
        else:
            state = f"prompt {hashlib.sha256(_compared_prompt(call).tobytes()).hexdigest()}"
        states[call.key.call_id], before = state, call
    return states


def _in_order(calls: Sequence[Generation], spans: Sequence[Span]) -> list[Generation | Span]:
    own = {call.key.call_id for call in calls}
    others = [span for span in spans if span.attributes.get(CALL_ID, "") not in own | {""}]
    every: list[Generation | Span] = [*calls, *others]
    return sorted(every, key=lambda call: call.start_time or 0.0) if others else every


def _count_until(named: Sequence[tuple[float, str]], used: int, time_s: float) -> int:
    """Return the number of keys that were named by a time, at least `used`."""
    while used < len(named) and named[used][0] <= time_s:
        used += 1
    return used


def _is_choice_of(one: Generation, other: Generation) -> bool:
    """Return True for two choices of one request."""
    return one.start_time == other.start_time and np.array_equal(
        _compared_prompt(one), _compared_prompt(other)
    )


def _compared_prompt(call: Generation) -> IntArray:
    return compared_ids(call.prompt_ids, call.images)
