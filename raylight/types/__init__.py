"""Domain types, and the transition tables of their states.

A *rollout* is one task given to the agent, an *attempt* one execution of it. A *generation* is one response
sampled from the engine, with its token ids. A *span* is one recorded operation or event. A *trajectory* is a
token sequence to train on.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from raylight.types.history import CONTINUED, DRIFTS, ContinuedKind, DriftKind, HistoryKind, HistoryNote
from raylight.types.json_object import JsonObject, Message
from raylight.types.rollouts import (
    ATTEMPT_FINISHED,
    ATTEMPT_TRANSITIONS,
    DRAW,
    FINISHED,
    GREEDY,
    LIVE,
    RETRIED,
    ROLLOUT_TRANSITIONS,
    SOURCE,
    TRAINABLE_AGENTS,
    TRUNCATED,
    WAITING,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Budget,
    Dataset,
    EnqueueRolloutRequest,
    Failure,
    FailureKind,
    PaginatedResult,
    ResourcesUpdate,
    Rollout,
    RolloutConfig,
    RolloutMode,
    RolloutState,
    RolloutStatus,
    RolloutTokens,
    StepGroups,
    TokenTotals,
    Worker,
    WorkerStatus,
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
        PenalisedRange,
        Penalties,
        PlacedImage,
        RouteArray,
        Tokenizer,
        TokenSets,
        TopLogprobs,
        Trajectory,
        VersionArray,
    )


def __getattr__(name: str) -> Any:
    """Load the types of tokens on their first use: they need numpy, which an agent's process does not."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("raylight.types.tokens"), name)
