"""Export of spans to a collector, in batches and by a thread. Imports the OpenTelemetry SDK."""

from __future__ import annotations

import copy
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter

from raylight.semconv import ATTEMPT_ID, ROLLOUT_ID
from raylight.traces.context import AttemptTrace

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


def _run_within(seconds: float, work: Callable[[], Any]) -> bool:
    """Return True if `work` ends within `seconds`, in a thread: the SDK's calls have no deadline."""
    thread = threading.Thread(target=work, name="raylight-export", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is shutting down and starts no more threads
        work()
        return True
    thread.join(seconds)
    return not thread.is_alive()
