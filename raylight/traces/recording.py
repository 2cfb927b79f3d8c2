"""Recording of spans that are complete at once, in the trace of the running attempt."""

from __future__ import annotations

import time

from raylight.traces.context import current_trace
from raylight.traces.parent_span import current_parent
from raylight.types import Attributes, Span, SpanCoreFields, TraceStatus


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
