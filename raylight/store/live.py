"""An attempt as the rules see it, and the columns that it is read from."""

from __future__ import annotations

from typing import NamedTuple

from raylight.types import AttemptStatus

WORKED_ON = "a.status IN ('preparing', 'running')"


class LiveAttempt(NamedTuple):
    """What the rules need of an attempt."""

    attempt_id: str
    rollout_id: str
    sequence_id: int
    status: AttemptStatus
    worker_id: str | None
    start_time: float
    last_heartbeat_time: float | None
    leased: bool
    silence: float | None
    timeout_at: float | None
    silent_at: float | None
    next_span: int
    lost: bool
    """It is thought unresponsive because of the infrastructure."""
    latest: bool
    """Of its rollout."""
    suspect: bool
    """Its rollout is suspected of having brought a runner down."""


LIVE_ATTEMPT = (
    "SELECT a.attempt_id, a.rollout_id, a.sequence_id, a.status, a.worker_id, a.start_time, a.last_heartbeat_time,"
    " a.request_id IS NOT NULL, a.silence, a.timeout_at, a.silent_at, a.next_span,"
    " json_extract(a.failure, '$.kind') IS 'infrastructure', a.sequence_id = r.n_attempts, r.suspect"
    " FROM attempts a JOIN rollouts r ON r.rollout_id = a.rollout_id"
)
"""Columns of LiveAttempt."""
