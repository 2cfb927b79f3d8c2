"""Status transitions: how an attempt decides its rollout, and what a user may set by hand.

Pure: no state, no clock.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

from raylight.errors import InvalidTransitionError
from raylight.types import (
    ATTEMPT_TRANSITIONS,
    FINISHED,
    ROLLOUT_TRANSITIONS,
    AttemptStatus,
    FailureKind,
    RolloutConfig,
    RolloutStatus,
)

MANUAL_TRANSITIONS: dict[RolloutStatus, frozenset[RolloutStatus]] = ROLLOUT_TRANSITIONS | {
    "queuing": FINISHED,
    "requeuing": FINISHED,
    "succeeded": frozenset({"requeuing"}),
    "failed": frozenset({"requeuing", "succeeded"}),
    "cancelled": frozenset({"requeuing"}),
}
"""Status changes that `update_rollout` allows: a waiting rollout can be decided and a finished one queued
again. Neither can be set to running, because no worker would execute it; `start_attempt` begins an attempt by
hand."""

STATUS_FROM_ATTEMPT: dict[AttemptStatus, RolloutStatus] = {
    "preparing": "preparing",
    "running": "running",
    "succeeded": "succeeded",
}
"""Status of a rollout whose latest attempt has not failed."""


FIRST_BACKOFF_S = 2.0
BACKOFF_FACTOR = 4.0
MAX_BACKOFF_S = 60.0
IS_LIVE = "a.status IN ('preparing', 'running')"
"""SQL condition of attempts that a worker executes."""

HOLD = "hold-"
"""Beginning of the id of an open call that samples nothing: until a recorder closes it, the attempt may have
answered calls that the recorder has not announced yet."""


class InfrastructureLosses(NamedTuple):
    """Counts of a rollout's attempts that were lost to the infrastructure."""

    lost: int
    charged: int
    """Losses that the rollout may have caused.

    When a runner dies with several attempts, the cause is unknown and none is charged.
    """


def decide(
    status: AttemptStatus,
    sequence_id: int,
    failure: FailureKind | None,
    losses: InfrastructureLosses,
    config: RolloutConfig,
) -> RolloutStatus:
    """Status of a rollout whose latest attempt has this status.

    Args:
        sequence_id: number of that attempt, from 1.
        failure: kind of its failure. An attempt that was lost to the infrastructure is retried within
            separate limits, a truncated one never.
        losses: losses of the rollout, including this attempt.
    """
    if status in STATUS_FROM_ATTEMPT:
        return STATUS_FROM_ATTEMPT[status]
    beyond_limit = max(losses.charged - config.infrastructure_retries, 0)  # count like other failed attempts
    if failure == "infrastructure" and not beyond_limit:
        return "requeuing"
    own_attempts = sequence_id - (losses.lost - beyond_limit)
    retried = status in config.retry_condition and own_attempts < config.max_attempts
    return "requeuing" if retried and failure != "truncated" else "failed"


def backoff_seconds(charged: int, attempt_id: str) -> float:
    """Time for which a rollout is held back after a charged loss to the infrastructure.

    It grows with each loss, and is spread over half of its length, so that the rollouts of a batch do not
    return at the same moment. The delays of the default number of retries add up to at least 5 s, which is
    longer than it takes to notice that the ingress is away.

    Args:
        charged: charged losses of the rollout, at least 1.
        attempt_id: the lost attempt, from which the delay's position in its range is derived.
    """
    longest = min(FIRST_BACKOFF_S * BACKOFF_FACTOR ** min(charged - 1, 10), MAX_BACKOFF_S)
    spread = zlib.crc32(attempt_id.encode("utf-8", "surrogatepass")) / 2**32
    return longest * (0.5 + 0.5 * spread)


def check_attempt_transition(attempt_id: str, before: AttemptStatus, after: AttemptStatus) -> None:
    """Raise InvalidTransitionError if an attempt cannot change from one status to the other."""
    if after not in ATTEMPT_TRANSITIONS[before]:
        raise InvalidTransitionError(f"attempt {attempt_id}: {before} -> {after}")


def check_manual_transition(rollout_id: str, before: RolloutStatus, after: RolloutStatus) -> None:
    """Raise InvalidTransitionError if `update_rollout` cannot change one status to the other."""
    if after not in MANUAL_TRANSITIONS[before]:
        allowed = ", ".join(sorted(MANUAL_TRANSITIONS[before]))
        raise InvalidTransitionError(
            f"rollout {rollout_id}: {before} -> {after} is not allowed; update_rollout can set: {allowed}"
        )


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
