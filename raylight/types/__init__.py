"""Domain types, and the transition tables of their states.

A *rollout* is one task given to the agent, an *attempt* one execution of it. A *generation* is one response
sampled from the engine, with its token ids. A *span* is one recorded operation or event. A *trajectory* is a
token sequence to train on.
"""

from raylight.types.collections import Dataset, PaginatedResult
from raylight.types.history import CONTINUED, DRIFTS, ContinuedKind, DriftKind, HistoryKind, HistoryNote
from raylight.types.rollouts import (
    GREEDY,
    TRAINABLE_AGENTS,
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    Failure,
    FailureKind,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    Worker,
)
from raylight.types.spans import (
    MAX_SEQUENCE_ID,
    Attributes,
    Event,
    Link,
    OtelResource,
    Span,
    SpanContext,
    SpanCoreFields,
    TraceStatus,
    Triplet,
    span_json,
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
    "CONTINUED",
    "DRIFTS",
    "FINISHED",
    "GREEDY",
    "GREEDY_BELOW",
    "LIVE",
    "MAX_SEQUENCE_ID",
    "RETRIED",
    "ROLLOUT_TRANSITIONS",
    "TRAINABLE_AGENTS",
    "WAITING",
    "Attempt",
    "AttemptStatus",
    "AttemptedRollout",
    "Attributes",
    "CallKey",
    "ContinuedKind",
    "Dataset",
    "DriftKind",
    "EnqueueRolloutRequest",
    "Event",
    "Failure",
    "FailureKind",
    "FinishReason",
    "FinishedRollout",
    "Generation",
    "HistoryKind",
    "HistoryNote",
    "Link",
    "OtelResource",
    "PaginatedResult",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RolloutMode",
    "RolloutStatus",
    "Span",
    "SpanContext",
    "SpanCoreFields",
    "TraceStatus",
    "Trajectory",
    "Triplet",
    "Worker",
    "WorkerStatus",
    "span_json",
]
