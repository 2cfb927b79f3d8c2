"""The nouns of a rollout's way through the house, and the tables of their states.

A *rollout* is one task given to the agent; an *attempt* is one try at it; a *generation* is one response sampled from the
engine, token for token; a *span* is anything that happened; a *trajectory* is the sequence of tokens that a learner sees.
"""

from raylight.types.rollouts import (
    GREEDY,
    TRAINABLE_AGENTS,
    Attempt,
    EnqueueRolloutRequest,
    Failure,
    FailureKind,
    Noun,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Worker,
)
from raylight.types.spans import (
    Attributes,
    Link,
    OtelResource,
    Span,
    SpanContext,
    SpanCoreFields,
    SpanEvent,
    TraceStatus,
    Triplet,
)
from raylight.types.states import (
    ATTEMPT_FINISHED,
    ATTEMPT_TRANSITIONS,
    FINISHED,
    LIVE,
    RETRIED,
    ROLLOUT_TRANSITIONS,
    WAITING,
    AttemptStatus,
    RolloutMode,
    RolloutStatus,
    WorkerStatus,
)
from raylight.types.tokens import GREEDY_BELOW, CallKey, FinishedRollout, FinishReason, Generation, Trajectory

__all__ = [
    "ATTEMPT_FINISHED",
    "ATTEMPT_TRANSITIONS",
    "FINISHED",
    "GREEDY",
    "GREEDY_BELOW",
    "LIVE",
    "RETRIED",
    "ROLLOUT_TRANSITIONS",
    "TRAINABLE_AGENTS",
    "WAITING",
    "Attempt",
    "AttemptStatus",
    "Attributes",
    "CallKey",
    "EnqueueRolloutRequest",
    "Failure",
    "FailureKind",
    "FinishReason",
    "FinishedRollout",
    "Generation",
    "Link",
    "Noun",
    "OtelResource",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RolloutMode",
    "RolloutStatus",
    "Span",
    "SpanContext",
    "SpanCoreFields",
    "SpanEvent",
    "TraceStatus",
    "Trajectory",
    "Triplet",
    "Worker",
    "WorkerStatus",
]
