"""States of rollouts, attempts and workers, and the tables of allowed transitions."""

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
"""Allowed changes of a rollout's status.

A requeued or failed rollout returns to running, or succeeds, when its latest attempt, which was taken for
unresponsive, responds again.
"""

ATTEMPT_TRANSITIONS: dict[AttemptStatus, frozenset[AttemptStatus]] = {
    "preparing": frozenset({"running", "succeeded", "failed", "unresponsive", "timeout"}),
    "running": frozenset({"succeeded", "failed", "unresponsive", "timeout"}),
    "unresponsive": frozenset({"running", "succeeded", "failed", "timeout"}),
    "succeeded": frozenset(),
    "failed": frozenset(),
    "timeout": frozenset(),
}
"""Allowed changes of an attempt's status."""

WAITING: frozenset[RolloutStatus] = frozenset({"queuing", "requeuing"})
"""Statuses of rollouts in the queue."""
FINISHED: frozenset[RolloutStatus] = frozenset({"succeeded", "failed", "cancelled"})
"""Final statuses of rollouts."""
LIVE: frozenset[AttemptStatus] = frozenset({"preparing", "running"})
"""Statuses of attempts that a worker is executing."""
ATTEMPT_FINISHED: frozenset[AttemptStatus] = frozenset(
    status for status, following in ATTEMPT_TRANSITIONS.items() if not following
)
"""Final statuses of attempts."""
RETRIED: frozenset[AttemptStatus] = frozenset({"failed", "unresponsive", "timeout"})
"""Statuses that a `retry_condition` may name."""
