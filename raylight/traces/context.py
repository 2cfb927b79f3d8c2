"""The trace of the running attempt, to which emitters and tracers add spans, and the parent of a new span.

Laws:
- Two attempts interleaved on one event loop, or in two threads, never mix spans, because the current trace is
  a context variable.
- Adding a span never blocks and never fails the agent. Spans over the capacity are dropped and counted.
- Spans with a reward have a separate capacity, so that other spans never displace a reward. An attempt
  that loses a reward cannot succeed.
"""

from __future__ import annotations

import contextlib
import secrets
import sys
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raylight.errors import RewardError
from raylight.semconv import OPERATION
from raylight.traces.reward_spans import SpanLike, has_reward
from raylight.types import MAX_REWARD_SPANS, MAX_SPANS, Attributes, Span, SpanCoreFields, TraceStatus

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanContext

MAX_TEXT = 256 * 2**20
"""Maximum number of characters in the attributes of an attempt's spans. It bounds the runner's memory."""
MAX_REWARD_TEXT = 16 * 2**20
"""Maximum number of characters in the attributes of an attempt's reward spans."""
SEND_BATCH = 1000
"""Maximum number of spans in a message to the store. A larger one would block the event loops of runner and
store."""
TOO_MANY_REWARDS = (
    f"an attempt has at most {MAX_REWARD_SPANS} spans with a reward, whose attributes have at most "
    f"{MAX_REWARD_TEXT} characters; emit fewer of them"
)

OWNER = "_raylight_trace"
"""Attribute of a span object that holds the trace it belongs to."""


class Capacity:
    """Remaining room for spans, by their number and by the characters of their attributes."""

    def __init__(self, spans: int, text: int) -> None:
        self._spans = spans
        self._text = text

    def take(self, span: Span) -> bool:
        """Reserve the room of a span; return False, and reserve nothing, if it does not fit."""
        text = _count_characters(span)
        if not self._spans or text > self._text:
            return False
        self._spans -= 1
        self._text -= text
        return True


def _count_characters(span: Span) -> int:
    """Return the number of characters of a span's attributes and events."""
    held = [span.attributes, *(event.attributes for event in span.events)]
    n_characters = len(span.name)
    for attributes in held:
        for key, value in attributes.items():
            n_characters += len(key) + (len(value) if type(value) is str else _length(value))
    return n_characters


def _length(value: object) -> int:
    if isinstance(value, list | tuple):
        return len(value) + sum(len(item) for item in value if isinstance(item, str))
    return len(value) if isinstance(value, str | bytes) else 1


class AttemptTrace:
    """Spans of one attempt, in the order in which they ended. Thread-safe.

    Args:
        rollout_id: id of the rollout, given to every added span.
        attempt_id: id of the attempt, given to every added span.
        max_spans: maximum number of spans without a reward.
        max_rewards: maximum number of spans with a reward.
    """

    def __init__(
        self,
        rollout_id: str,
        attempt_id: str,
        max_spans: int = MAX_SPANS,
        max_rewards: int = MAX_REWARD_SPANS,
    ) -> None:
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.trace_id = secrets.token_hex(16)
        """Trace id of spans that belong to no OpenTelemetry trace."""
        self.dropped = 0
        """Number of spans that were not kept: over the capacity, not storable, or after the end."""
        self.lost_rewards = 0
        """Number of spans with a reward that were not kept, or whose reward cannot be read."""
        self._reward_loss = ""
        """Reason for the first lost reward."""
        self.closed = False
        self._capacity = Capacity(max_spans, MAX_TEXT)
        self._reward_capacity = Capacity(max_rewards, MAX_REWARD_TEXT)
        self._spans: list[Span] = []
        self._sent = 0
        # reentrant: garbage collection may end a span at any point of this thread, also while it holds the
        # lock
        self._lock = threading.RLock()

    def add(self, span: Span) -> None:
        """Add a span. After the end of the attempt, or beyond the capacity, it is dropped and counted."""
        with self._lock:
            if self.closed:
                self.dropped += 1
                return
            try:
                rewarded = has_reward(span)
            except RewardError as error:  # the span is kept, to show what the agent recorded
                rewarded = False
                self._lose_reward(str(error))
            if not (self._reward_capacity if rewarded else self._capacity).take(span):
                self.drop(span)
                return
            if (span.rollout_id, span.attempt_id) != (self.rollout_id, self.attempt_id):
                span = span.model_copy(update={"rollout_id": self.rollout_id, "attempt_id": self.attempt_id})
            self._spans.append(span)

    def drop(self, span: SpanLike, reason: str = TOO_MANY_REWARDS) -> None:
        """Count a span that is not kept, and its reward as lost if it has one.

        Args:
            reason: cause of the loss, for the error about lost rewards.
        """
        with self._lock:
            self.dropped += 1
            with contextlib.suppress(RewardError):  # counted when the span was added
                if has_reward(span):
                    self._lose_reward(reason)

    def _lose_reward(self, reason: str) -> None:
        self.lost_rewards += 1
        self._reward_loss = self._reward_loss or reason

    @property
    def reward_error(self) -> RewardError | None:
        """Error of an attempt that lost rewards; None if it lost none."""
        if not self.lost_rewards:
            return None
        others = f" (and {self.lost_rewards - 1} more)" if self.lost_rewards > 1 else ""
        return RewardError(f"a reward was recorded, but could not be kept{others}: {self._reward_loss}")

    @property
    def losses(self) -> dict[str, int] | None:
        """Counts of dropped spans and lost rewards, for the attempt's metadata; None if nothing was lost."""
        counts = {"spans_dropped": self.dropped, "rewards_lost": self.lost_rewards}
        return {name: count for name, count in counts.items() if count} or None

    @property
    def spans(self) -> list[Span]:
        """All spans added so far."""
        with self._lock:
            return list(self._spans)

    def take(self, limit: int | None = None) -> list[Span]:
        """Return spans added since the last call, to be sent to the store.

        Args:
            limit: maximum number of spans; None for all.
        """
        with self._lock:
            end = len(self._spans) if limit is None else self._sent + limit
            fresh = self._spans[self._sent : end]
            self._sent += len(fresh)
            return fresh

    def close(self) -> None:
        """Reject further spans, because the attempt is decided."""
        with self._lock:
            self.closed = True


_CURRENT: ContextVar[AttemptTrace | None] = ContextVar("raylight_trace", default=None)


def current_trace() -> AttemptTrace | None:
    """Return the trace of the running attempt; None outside an attempt."""
    return _CURRENT.get()


@contextlib.contextmanager
def tracing(trace: AttemptTrace) -> Iterator[AttemptTrace]:
    """Make a trace the current one, in this context and in its copies (such as tasks')."""
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)


@dataclass(frozen=True)
class ParentSpan:
    """Ids of a span that can be the parent of others, as hexadecimal text."""

    trace_id: str
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))


_OPERATION: ContextVar[tuple[ParentSpan, ParentSpan | None] | None] = ContextVar(
    "raylight_operation", default=None
)
"""The innermost operation, and the current span of OpenTelemetry at its start."""


def current_parent() -> ParentSpan | None:
    """Return the innermost open span; None if there is none."""
    otel = _current_otel_span()
    operation = _OPERATION.get()
    if operation is None or otel not in (None, operation[1]):
        return otel  # opened by a library within the operation
    return operation[0]


def _current_otel_span() -> ParentSpan | None:
    """Return the current span of OpenTelemetry, if the process has loaded OpenTelemetry."""
    if "opentelemetry" not in sys.modules:
        return None
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    return parent_from_context(context) if context.is_valid else None


def parent_from_context(context: SpanContext) -> ParentSpan:
    """Convert the ids of an OpenTelemetry span."""
    return ParentSpan(f"{context.trace_id:032x}", f"{context.span_id:016x}")


def start_otel_span(trace: AttemptTrace) -> OtelSpan | None:
    """Start an OpenTelemetry span for an operation; None unless raylight's tracer listens in this process.

    The tracer adds the span to the trace, and exports it, when the span ends. Spans of libraries then become
    its children, also in threads that have only OpenTelemetry's context.
    """
    if "raylight.traces.otel" not in sys.modules:
        return None
    from opentelemetry.trace import get_tracer

    span = get_tracer("raylight").start_span(OPERATION)
    # a span that no tracer of ours listens to is never ended, and so is dropped
    return span if getattr(span, OWNER, None) is trace else None


@contextlib.contextmanager
def use_parent(parent: ParentSpan, otel_span: OtelSpan | None) -> Iterator[None]:
    """Make `parent` the parent of the block's spans, from emitters and with `otel_span` from libraries."""
    outer, otel_outer = _OPERATION.get(), _enter_otel(otel_span)
    _OPERATION.set((parent, _current_otel_span()))
    try:
        yield
    finally:
        # set, not reset by token: an abandoned generator may be closed in another context, which rejects the
        # token
        _OPERATION.set(outer)
        if otel_outer is not None:
            _set_otel(otel_outer)


def _enter_otel(span: OtelSpan | None) -> object:
    """Make a span the current one of OpenTelemetry, and return the previous context."""
    if span is None:
        return None
    from opentelemetry import context, trace

    outer = context.get_current()
    _set_otel(trace.set_span_in_context(span, outer))
    return outer


def _set_otel(current: Any) -> None:
    from opentelemetry import context

    context.attach(current)


def record_span(
    name: str,
    attributes: Attributes,
    *,
    time_s: float | None = None,
    status: TraceStatus | None = None,
    propagate: bool = True,
) -> SpanCoreFields:
    """Add a span to the trace of the running attempt, below the innermost open span; return its fields.

    Outside an attempt it only returns them.

    Args:
        time_s: start and end, in seconds since the epoch. None: now.
        status: outcome of the operation. None: OK.
        propagate: False only returns the fields.
    """
    time_s = time.time() if time_s is None else time_s
    core = SpanCoreFields(name=name, attributes=attributes, start_time=time_s, end_time=time_s)
    if status is not None:
        core.status = status
    trace = current_trace() if propagate else None
    if trace is not None:
        parent = current_parent()
        trace.add(
            Span.from_attributes(
                name=name,
                attributes=attributes,
                start_time=time_s,
                end_time=time_s,
                status=core.status,
                trace_id=parent.trace_id if parent else trace.trace_id,
                parent_id=parent.span_id if parent else None,
            )
        )
    return core
