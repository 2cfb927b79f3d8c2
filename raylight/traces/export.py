"""Export of spans to a collector: in batches, by a thread, never in the agent's way. Loads the OpenTelemetry SDK."""

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
    """Sends spans to an exporter, each with its attempt's ids as resource attributes.

    The queue is the SDK's: bounded (`OTEL_BSP_MAX_QUEUE_SIZE`), and what does not fit is dropped and logged.
    """

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._batches = BatchSpanProcessor(exporter)
        self._resources: weakref.WeakKeyDictionary[AttemptTrace, Resource] = weakref.WeakKeyDictionary()

    def add(self, span: ReadableSpan, trace: AttemptTrace) -> None:
        """Queue an ended span. It does not wait."""
        resource = self._resources.get(trace)
        if resource is None:
            ids = {ROLLOUT_ID: trace.rollout_id, ATTEMPT_ID: trace.attempt_id}
            resource = self._resources[trace] = span.resource.merge(Resource(ids))
        keyed = copy.copy(span)  # other processors of the provider see the span as it was
        keyed._resource = resource
        self._batches.on_end(keyed)

    def flush(self, seconds: float) -> bool:
        """Export what is queued; False if that takes longer."""
        return _within(seconds, self._batches.force_flush)

    def close(self, seconds: float = CLOSE_TIMEOUT_S) -> bool:
        """Export what is queued and end; what is left after `seconds` is dropped, and it returns False."""
        if _within(seconds, self._batches.shutdown):
            return True
        logger.warning(
            "the last spans were not exported within %g s and are dropped; is the collector up?", seconds
        )
        self._exporter.shutdown()  # wakes an export that waits for its next try
        return False


def _within(seconds: float, work: Callable[[], Any]) -> bool:
    """Do something in a thread that is left behind when it takes too long: the SDK's own calls know no deadline."""
    thread = threading.Thread(target=work, name="raylight-export", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is on its way out and starts no more threads
        work()
        return True
    thread.join(seconds)
    return not thread.is_alive()
