"""Turns of rollouts: trained calls with their states and rewards, for estimators that credit turns."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from raylight.experience.advantages import TurnGroups
from raylight.experience.rewards import RewardRules
from raylight.experience.trajectory import Trajectories
from raylight.semconv import STATE_KEY
from raylight.types import FinishedRollout, Generation, Span


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
    """Return the name of the state of each call that was not cut off, by call id."""
    named = [
        (span.start_time or 0.0, str(span.attributes[STATE_KEY]))
        for span in spans
        if STATE_KEY in span.attributes
    ]
    named.sort(key=lambda pair: pair[0])
    states, used = {}, 0
    for call in calls:
        if call.finish_reason == "aborted":  # the client sends it again, in the same state
            continue
        before = used
        while used < len(named) and named[used][0] <= call.start_time:
            used += 1
        if used > before:
            states[call.key.call_id] = f"key {named[used - 1][1]}"
        else:
            states[call.key.call_id] = f"prompt {hashlib.sha256(call.prompt_ids.tobytes()).hexdigest()}"
    return states
