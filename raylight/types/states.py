"""States of rollouts, attempts and workers, and the tables of their changes."""

from __future__ import annotations

from typing import Literal

RolloutMode = Literal["train", "val", "test"]
RolloutStatus = Literal["queuing", "preparing", "running", "succeeded", "failed", "requeuing", "cancelled"]
AttemptStatus = Literal["preparing", "running", "succeeded", "failed", "unresponsive", "timeout"]
WorkerStatus = Literal["idle", "busy", "unknown"]

ROLLOUT_TRANSITIONS: dict[RolloutStatus, frozenset[RolloutStatus]] = {
    "queuing": frozenset({"preparing", "cancelled"}),
    "preparing": frozenset({"running", "succeeded", "failed", "requeuing", "cancelled"}),
    "running": frozenset({"succeeded", "failed", "requeuing", "cancelled"}),
    "requeuing": frozenset({"preparing", "running", "succeeded", "failed", "cancelled"}),
    "succeeded": frozenset(),
    "failed": frozenset({"running", "succeeded"}),
    "cancelled": frozenset(),
}
"""A requeued or failed rollout goes on where its latest attempt, thought unresponsive, gives a sign of life after all."""

ATTEMPT_TRANSITIONS: dict[AttemptStatus, frozenset[AttemptStatus]] = {
    "preparing": frozenset({"running", "succeeded", "failed", "unresponsive", "timeout"}),
    "running": frozenset({"succeeded", "failed", "unresponsive", "timeout"}),
    "unresponsive": frozenset({"running", "succeeded", "failed", "timeout"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "timeout": frozenset(),
}

WAITING: frozenset[RolloutStatus] = frozenset({"queuing", "requeuing"})
FINISHED: frozenset[RolloutStatus] = frozenset({"succeeded", "failed", "cancelled"})
LIVE: frozenset[AttemptStatus] = frozenset({"preparing", "running"})
"""Attempts that somebody works on."""
ATTEMPT_FINISHED: frozenset[AttemptStatus] = frozenset(
    s for s, following in ATTEMPT_TRANSITIONS.items() if not following
)
RETRIED: frozenset[AttemptStatus] = frozenset({"failed", "unresponsive", "timeout"})
"""What a `retry_condition` may name."""
