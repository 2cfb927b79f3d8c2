"""The rules by which attempts decide rollouts. Pure: no state, no clock."""

from __future__ import annotations

from raylight.errors import InvalidTransitionError
from raylight.types import (
    ATTEMPT_TRANSITIONS,
    FINISHED,
    ROLLOUT_TRANSITIONS,
    WAITING,
    AttemptStatus,
    RolloutConfig,
    RolloutStatus,
)

_AGAIN: frozenset[RolloutStatus] = frozenset({"requeuing"})
_DECIDED: frozenset[RolloutStatus] = frozenset({"succeeded", "failed"})
BY_HAND: dict[RolloutStatus, frozenset[RolloutStatus]] = {
    before: following | (_AGAIN if before in FINISHED else frozenset()) | (_DECIDED if before in WAITING else frozenset())
    for before, following in ROLLOUT_TRANSITIONS.items()
}
"""What `update_rollout` may do beside: put a finished rollout back into the queue, and decide one that waits."""

CONTINUED: dict[AttemptStatus, RolloutStatus] = {"preparing": "preparing", "running": "running", "succeeded": "succeeded"}
"""What a rollout is while its latest attempt is well."""


def decide(
    status: AttemptStatus, sequence_id: int, infrastructure: bool, infrastructure_failures: int, config: RolloutConfig
) -> RolloutStatus:
    """The status of a rollout whose latest attempt has this status.

    Args:
        sequence_id: of that attempt.
        infrastructure: the attempt was lost to the infrastructure.
        infrastructure_failures: how many attempts of the rollout were, this one included.
    """
    if status in CONTINUED:
        return CONTINUED[status]
    if infrastructure:
        return "requeuing" if infrastructure_failures <= config.infrastructure_retries else "failed"
    own = sequence_id - infrastructure_failures
    return "requeuing" if status in config.retry_condition and own < config.max_attempts else "failed"


def check_attempt(attempt_id: str, before: AttemptStatus, after: AttemptStatus) -> None:
    """Raise InvalidTransitionError if an attempt cannot go from one status to the other."""
    if after not in ATTEMPT_TRANSITIONS[before]:
        raise InvalidTransitionError(f"attempt {attempt_id}: {before} -> {after}")


def check_rollout(rollout_id: str, before: RolloutStatus, after: RolloutStatus, by_hand: bool = False) -> None:
    """Raise InvalidTransitionError if a rollout cannot go from one status to the other."""
    if after not in (BY_HAND if by_hand else ROLLOUT_TRANSITIONS)[before]:
        raise InvalidTransitionError(f"rollout {rollout_id}: {before} -> {after}")
