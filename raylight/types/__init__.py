"""Domain types, and the transition tables of their states.

A *rollout* is one task given to the agent, an *attempt* one execution of it. A *generation* is one response
sampled from the engine, with its token ids. A *span* is one recorded operation or event. A *trajectory* is a
token sequence to train on.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raylight.types.collections import Dataset, PaginatedResult
from raylight.types.history import CONTINUED, DRIFTS, ContinuedKind, DriftKind, HistoryKind, HistoryNote
from raylight.types.rollouts import (
    DRAW,
    GREEDY,
    SOURCE,
    TRAINABLE_AGENTS,
    TRUNCATED,
    Attempt,
    AttemptedRollout,
    Budget,
    EnqueueRolloutRequest,
    Failure,
    FailureKind,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutState,
    RolloutTokens,
    StepGroups,
    TokenTotals,
    Worker,
)
from raylight.types.spans import (
    MAX_REWARD_SPANS,
    MAX_SEQUENCE_ID,
    MAX_SPANS,
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

if TYPE_CHECKING:
    from raylight.types.tokens import (
        AUXILIARY,
        GREEDY_BELOW,
        NEVER_SAMPLED_BELOW,
        REPEATED,
        CallKey,
        FinishedRollout,
        FinishReason,
        Generation,
        IntArray,
        LogprobArray,
        MaskArray,
        Trajectory,
        VersionArray,
    )

__all__ = [
    "ATTEMPT_FINISHED",
    "ATTEMPT_TRANSITIONS",
    "AUXILIARY",
    "CONTINUED",
    "DRAW",
    "DRIFTS",
    "FINISHED",
    "GREEDY",
    "GREEDY_BELOW",
    "LIVE",
    "MAX_REWARD_SPANS",
    "MAX_SEQUENCE_ID",
    "MAX_SPANS",
    "NEVER_SAMPLED_BELOW",
    "REPEATED",
    "RETRIED",
    "ROLLOUT_TRANSITIONS",
    "SOURCE",
    "TRAINABLE_AGENTS",
    "TRUNCATED",
    "WAITING",
    "Attempt",
    "AttemptStatus",
    "AttemptedRollout",
    "Attributes",
    "Budget",
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
    "IntArray",
    "Link",
    "LogprobArray",
    "MaskArray",
    "OtelResource",
    "PaginatedResult",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RolloutMode",
    "RolloutState",
    "RolloutStatus",
    "RolloutTokens",
    "Span",
    "SpanContext",
    "SpanCoreFields",
    "StepGroups",
    "TokenTotals",
    "TraceStatus",
    "Trajectory",
    "Triplet",
    "VersionArray",
    "Worker",
    "WorkerStatus",
    "span_json",
]


def __getattr__(name: str) -> Any:
    """Load the types of tokens on their first use: they need numpy, which an agent's process does not."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("raylight.types.tokens"), name)
