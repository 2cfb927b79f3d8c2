"""Span processor that assigns OpenTelemetry spans to attempts, and their export to a collector.

It imports the SDK, so only `OtelTracer.setup` imports this module.

Laws: nothing here blocks, sends, or fails the agent's code; a thread exports spans in batches. A span that
never ends leaves nothing behind once its attempt is over.
"""

from __future__ import annotations

import copy
import logging
import os
import threading
import weakref
from collections.abc import Callable

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import (
    ConcurrentMultiSpanProcessor,
    ReadableSpan,
    SpanLimits,
    SpanProcessor,
    TracerProvider,
)
from opentelemetry.sdk.trace import Span as SdkSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

from raylight.errors import TracerError
from raylight.semconv import ATTEMPT_ID, ROLLOUT_ID
from raylight.traces.context import OWNER, AttemptTrace, current_trace
from raylight.types import Span

logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0


class AttemptExport:
    """Export queue of spans, which gives each the ids of its attempt as resource attributes.

    The queue is the SDK's: it is bounded (`OTEL_BSP_MAX_QUEUE_SIZE`), and overflowing spans are dropped and
    logged.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._batches = BatchSpanProcessor(exporter)
        self._resources: weakref.WeakKeyDictionary[AttemptTrace, Resource] = weakref.WeakKeyDictionary()

    def add(self, span: ReadableSpan, trace: AttemptTrace) -> None:
        """Queue an ended span, without blocking."""
        resource = self._resources.get(trace)
        if resource is None:
            ids = {ROLLOUT_ID: trace.rollout_id, ATTEMPT_ID: trace.attempt_id}
            resource = self._resources[trace] = span.resource.merge(Resource(ids))
        copied = copy.copy(span)  # the span itself stays unchanged for the provider's other processors
        copied._resource = resource
        self._batches.on_end(copied)

    def flush(self, seconds: float) -> bool:
        """Export the queued spans. Return False if that takes longer than `seconds`."""
        return _run_within(seconds, self._batches.force_flush)

    def close(self, seconds: float = CLOSE_TIMEOUT_S) -> bool:
        """Export the queued spans and stop. Drop those left after `seconds`, and return False then."""
        if _run_within(seconds, self._batches.shutdown):
            return True
        logger.warning(
            "the last spans were not exported within %g s and are dropped; check that the collector runs",
            seconds,
        )
        self._exporter.shutdown()  # wakes an export that waits for its next retry
        return False


def _run_within(seconds: float, work: Callable[[], object]) -> bool:
    """Return True if `work` ends within `seconds`, in a thread: the SDK's calls have no deadline."""
    thread = threading.Thread(target=work, name="raylight-export", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        work()
        return True
    thread.join(seconds)
    return not thread.is_alive()


SPAN_LIMIT = 10_000
"""Maximum number of attributes, and of events, of a span in raylight's own provider.

The SDK's default of 128 would silently truncate long conversations, which have several attributes per
message.
"""


class SpanCapture(SpanProcessor):
    """Span processor that adds spans to the traces of their attempts; one per provider and process.

    A provider cannot remove a span processor, so it records only while a tracer is set up.
    """

    def __init__(self) -> None:
        self.failed = 0
        """Spans that could not be assigned, converted or queued for export."""
        self.truncated = 0
        """Spans that lost attributes to the provider's limits."""
        self._lock = threading.Lock()
        self._tracers = 0
        self._exports: tuple[AttemptExport, ...] = ()
        self._open: weakref.WeakValueDictionary[tuple[int, int], AttemptTrace] = weakref.WeakValueDictionary()
        """Trace of each open span, by trace id and span id: `on_end` receives another object than
        `on_start`."""

    def add_tracer(self, export: AttemptExport | None) -> None:
        """Count a tracer that is set up, and add its export."""
        with self._lock:
            self._tracers += 1
            if export is not None:
                self._exports = (*self._exports, export)

    def remove_tracer(self, export: AttemptExport | None) -> None:
        """Remove a tracer that is torn down, with the export that it added."""
        with self._lock:
            self._tracers -= 1
            self._exports = tuple(other for other in self._exports if other is not export)

    def on_start(self, span: SdkSpan, parent_context: Context | None = None) -> None:
        if not self._tracers:
            return
        try:
            owner = current_trace() or self._owner_of_parent(parent_context)
            if owner is not None:
                setattr(span, OWNER, owner)
                context = span.get_span_context()
                self._open[context.trace_id, context.span_id] = owner
        except Exception:  # errors here must not reach the agent's code
            self._count_failure(span)

    def on_end(self, span: ReadableSpan) -> None:
        owner = None
        try:
            context = span.get_span_context()
            owner = self._open.pop((context.trace_id, context.span_id), None) if context else None
            if owner is None:
                return
            if span.dropped_attributes:
                self._count_truncated(span)
            owner.add(Span.from_opentelemetry(span, owner.rollout_id, owner.attempt_id))
            for export in self._exports:
                export.add(span, owner)
        except Exception as error:  # errors here must not reach the agent's code
            self._count_failure(span)
            if owner is not None:
                owner.drop(span, f"span {span.name!r} cannot be converted: {error!r}")

    def shutdown(self) -> None:
        """Close all exports. The provider calls it when it shuts down, at the latest at interpreter exit."""
        with self._lock:
            exports, self._exports = self._exports, ()
        for export in exports:
            export.close()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        # a list, so that all are flushed even after one that is late
        flushed = [export.flush(timeout_millis / 1000) for export in self._exports]
        return all(flushed)

    def _owner_of_parent(self, parent_context: Context | None) -> AttemptTrace | None:
        """Return the trace of the parent, which is a span object or only ids (from a header, for example)."""
        parent = otel.get_current_span(parent_context)
        owner: AttemptTrace | None = getattr(parent, OWNER, None)
        if owner is None:
            context = parent.get_span_context()
            owner = self._open.get((context.trace_id, context.span_id))
        return owner

    def _count_failure(self, span: ReadableSpan) -> None:
        with self._lock:
            self.failed += 1
            first = self.failed == 1
        logger.warning("span %r could not be converted and is dropped", span.name, exc_info=first)

    def _count_truncated(self, span: ReadableSpan) -> None:
        with self._lock:
            self.truncated += 1
            first = self.truncated == 1
        if first:
            logger.warning(
                "span %r lost %d attributes to the limits of the tracer provider; raise "
                "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT (further ones are only counted)",
                span.name,
                span.dropped_attributes,
            )


_CAPTURES: weakref.WeakKeyDictionary[otel.TracerProvider, SpanCapture] = weakref.WeakKeyDictionary()
_LOCK = threading.Lock()


def process_capture(service_name: str) -> SpanCapture:
    """Return the SpanCapture of the global tracer provider. Install a provider if there is none.

    Raises:
        TracerError: the global provider takes no span processors, runs them in other threads, or is disabled.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        raise TracerError("OTEL_SDK_DISABLED=true disables all spans; unset it, or trace with DummyTracer")
    with _LOCK:
        provider = otel.get_tracer_provider()
        if isinstance(provider, otel.ProxyTracerProvider):
            provider = _install(service_name)
        if not hasattr(provider, "add_span_processor"):
            raise TracerError(
                "the global tracer provider is a "
                f"{type(provider).__module__}.{type(provider).__qualname__}, which takes no span "
                "processors; use an opentelemetry.sdk.trace.TracerProvider in the agent, or trace with "
                "DummyTracer"
            )
        if isinstance(getattr(provider, "_active_span_processor", None), ConcurrentMultiSpanProcessor):
            raise TracerError(
                "the global tracer provider runs its span processors in other threads "
                "(ConcurrentMultiSpanProcessor), where the attempt of a span is unknown; create it without "
                "active_span_processor"
            )
        if provider not in _CAPTURES:
            capture = SpanCapture()
            provider.add_span_processor(capture)
            _CAPTURES[provider] = capture
        return _CAPTURES[provider]


def _install(service_name: str) -> otel.TracerProvider:
    """Install a provider that samples every span: dropped spans could not be trained on."""
    limits = SpanLimits(max_span_attributes=SPAN_LIMIT, max_events=SPAN_LIMIT)
    resource = Resource.create({SERVICE_NAME: service_name})
    otel.set_tracer_provider(TracerProvider(sampler=ALWAYS_ON, resource=resource, span_limits=limits))
    return otel.get_tracer_provider()
