"""Parent of a new span: the innermost operation, or the current span of OpenTelemetry."""

from __future__ import annotations

import contextlib
import secrets
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raylight.semconv import OPERATION
from raylight.traces.context import AttemptTrace

if TYPE_CHECKING:
    from opentelemetry.trace import Span as OtelSpan
    from opentelemetry.trace import SpanContext


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

    from raylight.traces.otel import OWNER

    span = get_tracer("raylight").start_span(OPERATION)
    # a span that no tracer of ours listens to is never ended, and so is dropped
    return span if getattr(span, OWNER, None) is trace else None


@contextlib.contextmanager
def use_parent(parent: ParentSpan, otel_span: OtelSpan | None) -> Iterator[None]:
    """Make `parent` the parent of the block's spans: those of emitters, and with `otel_span` of libraries."""
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


def _enter_otel(span: OtelSpan | None) -> Any:
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
