"""State of an attempt as the store's rules read it."""

from __future__ import annotations

from typing import NamedTuple

from raylight.types import AttemptStatus

IS_LIVE = "a.status IN ('preparing', 'running')"
"""SQL condition of attempts that a worker executes."""


HOLD = "hold-"
"""Beginning of the id of an open call that samples nothing: until a recorder closes it, the attempt may have
answered calls that the recorder has not announced yet."""


class AttemptState(NamedTuple):
    """Columns of an attempt, and of its rollout, from which transitions and deadlines are computed."""

    attempt_id: str
    rollout_id: str
    sequence_id: int
    """Number of the attempt within its rollout, from 1."""
    status: AttemptStatus
    worker_id: str | None
    began: float
    last_heartbeat_time: float | None
    leased: bool
    """True if the attempt came from the queue; one that was started by hand has no lease."""
    unresponsive_seconds: float | None
    """Time without a span or a call after which the attempt is unresponsive."""
    timeout_at: float | None
    unresponsive_at: float | None
    deadline: float | None
    """The earliest limit. It, the limits and `began` are in seconds that the run has lived."""
    next_sequence_id: int = 1
    """Sequence id of the attempt's next span."""
    lost: bool = False
    """True if the attempt is unresponsive because of the infrastructure."""
    latest: bool = True
    """True if the rollout has no later attempt."""
    suspect: bool = False
    """True if the rollout is suspected of crashing a runner."""
    charged: bool = False
    """True if the attempt's loss counts against the rollout's `infrastructure_retries`."""


SELECT_STATE = (
    "SELECT a.attempt_id, a.rollout_id, a.sequence_id, a.status, a.worker_id, a.began, "
    "a.last_heartbeat_time, a.request_id IS NOT NULL, a.silence, a.timeout_at, a.silent_at, a.deadline, "
    "a.next_span, json_extract(a.failure, '$.kind') IS 'infrastructure', a.sequence_id = r.n_attempts, "
    "r.suspect, a.charged FROM attempts a JOIN rollouts r ON r.rollout_id = a.rollout_id"
)
"""Columns of AttemptState."""
