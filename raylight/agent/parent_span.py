"""Where a new span hangs: below the innermost operation, or below the current span of OpenTelemetry."""

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
    """A span below which others may hang; ids in hex."""

    trace_id: str
    span_id: str = field(default_factory=lambda: secrets.token_hex(8))


_OPERATION: ContextVar[tuple[ParentSpan, ParentSpan | None] | None] = ContextVar(
    "raylight_operation", default=None
)
"""The innermost operation, and what was OpenTelemetry's current span when it began."""


def current_parent() -> ParentSpan | None:
    """The innermost span that is open here; None if there is none."""
    otel = _otel_place()
    operation = _OPERATION.get()
    if operation is None or otel not in (None, operation[1]):
        return otel  # a library opened it within the operation
    return operation[0]


def _otel_place() -> ParentSpan | None:
    """OpenTelemetry's current span, if the process has loaded it at all."""
    if "opentelemetry" not in sys.modules:
        return None
    from opentelemetry import trace

    context = trace.get_current_span().get_span_context()
    return parent_from_context(context) if context.is_valid else None


def parent_from_context(context: SpanContext) -> ParentSpan:
    return ParentSpan(f"{context.trace_id:032x}", f"{context.span_id:016x}")


def start_otel_span(trace: AttemptTrace) -> OtelSpan | None:
    """A span of OpenTelemetry for an operation, which our tracer adds to the trace when it ends; None if none is listening.

    Libraries' spans then hang below it, also in threads that know only OpenTelemetry's context, and it is exported with them.
    """
    if "raylight.traces.otel" not in sys.modules:
        return None
    from opentelemetry.trace import get_tracer

    from raylight.traces.otel import OWNER

    span = get_tracer("raylight").start_span(OPERATION)
    return (
        span if getattr(span, OWNER, None) is trace else None
    )  # one that nobody listens to is never ended, so it is dropped


@contextlib.contextmanager
def inside(place: ParentSpan, otel: OtelSpan | None) -> Iterator[None]:
    """Hang spans made in here below `place`: those of the emitters, and where `otel` is its span, also those of libraries."""
    outer, otel_outer = _OPERATION.get(), _enter_otel(otel)
    _OPERATION.set((place, _otel_place()))
    try:
        yield
    finally:
        # Set back, not reset by token: an abandoned generator may be closed in another context, where a token is refused.
        _OPERATION.set(outer)
        if otel_outer is not None:
            _set_otel(otel_outer)


def _enter_otel(span: OtelSpan | None) -> Any:
    """Make a span OpenTelemetry's current one; gives the context that was current."""
    if span is None:
        return None
    from opentelemetry import context, trace

    outer = context.get_current()
    _set_otel(trace.set_span_in_context(span, outer))
    return outer


def _set_otel(current: Any) -> None:
    from opentelemetry import context

    context.attach(current)
