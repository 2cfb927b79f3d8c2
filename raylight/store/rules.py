"""The rules by which attempts decide rollouts. Pure: no state, no clock."""

from __future__ import annotations

from typing import NamedTuple

from raylight.errors import InvalidTransitionError
from raylight.types import (
    ATTEMPT_TRANSITIONS,
    FINISHED,
    ROLLOUT_TRANSITIONS,
    AttemptStatus,
    RolloutConfig,
    RolloutStatus,
)

BY_HAND: dict[RolloutStatus, frozenset[RolloutStatus]] = ROLLOUT_TRANSITIONS | {
    "queuing": FINISHED,
    "requeuing": FINISHED,
    "succeeded": frozenset({"requeuing"}),
    "failed": frozenset({"requeuing", "succeeded"}),
    "cancelled": frozenset({"requeuing"}),
}
"""What `update_rollout` may do: a rollout that waits can be decided and a finished one queued again, but neither can be said to
run, for nobody would run it; `start_attempt` is for that."""

CONTINUED: dict[AttemptStatus, RolloutStatus] = {
    "preparing": "preparing",
    "running": "running",
    "succeeded": "succeeded",
}
"""What a rollout is while its latest attempt is well."""


class Losses(NamedTuple):
    """Attempts of a rollout that were lost to the infrastructure."""

    lost: int
    charged: int
    """Those of them that it may have brought about itself: where a runner dies with many attempts, nobody knows which did it."""


def decide(
    status: AttemptStatus, sequence_id: int, infrastructure: bool, losses: Losses, config: RolloutConfig
) -> RolloutStatus:
    """The status of a rollout whose latest attempt has this status.

    Args:
        sequence_id: of that attempt.
        infrastructure: the attempt was lost to the infrastructure.
        losses: of the rollout, this attempt included.
    """
    if status in CONTINUED:
        return CONTINUED[status]
    beyond = max(losses.charged - config.infrastructure_retries, 0)  # these count like other attempts
    if infrastructure and not beyond:
        return "requeuing"
    own = sequence_id - (losses.lost - beyond)
    return "requeuing" if status in config.retry_condition and own < config.max_attempts else "failed"


def check_attempt(attempt_id: str, before: AttemptStatus, after: AttemptStatus) -> None:
    """Raise InvalidTransitionError if an attempt cannot go from one status to the other."""
    if after not in ATTEMPT_TRANSITIONS[before]:
        raise InvalidTransitionError(f"attempt {attempt_id}: {before} -> {after}")


def check_by_hand(rollout_id: str, before: RolloutStatus, after: RolloutStatus) -> None:
    """Raise InvalidTransitionError if `update_rollout` cannot bring a rollout from one status to the other."""
    if after not in BY_HAND[before]:
        allowed = ", ".join(sorted(BY_HAND[before]))
        raise InvalidTransitionError(
            f"rollout {rollout_id}: {before} -> {after}; by hand it can become: {allowed}"
        )
