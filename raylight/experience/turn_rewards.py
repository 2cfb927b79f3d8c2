"""Rewards that came before the final one: which call each is for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from raylight.experience.trajectory import CallPlace
from raylight.traces.rewards import get_reward_value
from raylight.types import FinishedRollout, Span


@dataclass(frozen=True, slots=True)
class TurnReward:
    """A reward for the last call before it."""

    value: float
    rollout: int
    """Its place in the batch."""
    row: int | None
    """The row that has the call: of the batch, or of the rollout where no batch is made yet. None if it was left out."""
    token: int
    """Index of the call's last token in the row."""


def emitted_before_final(item: FinishedRollout) -> list[tuple[Span, float]]:
    """The rewards that a rollout emitted before the final one; all of them if it failed, because then none is final."""
    emitted = [(span, value) for span in item.spans if (value := get_reward_value(span)) is not None]
    return emitted[:-1] if item.rollout.status == "succeeded" else emitted


def turn_rewards_of(item: FinishedRollout, places: Sequence[CallPlace]) -> list[TurnReward]:
    """The rewards that a rollout emitted before the final one, each for the last of its calls that had ended by then.

    One that came before all calls is for the first.

    Args:
        places: of the calls that are trained; at least one.
    """
    by_end = sorted(places, key=lambda place: place.end_time)
    turns = []
    for span, value in emitted_before_final(item):
        before = [place for place in by_end if span.start_time is None or place.end_time <= span.start_time]
        place = before[-1] if before else by_end[0]
        turns.append(TurnReward(value, 0, place.row, place.last))
    return turns
