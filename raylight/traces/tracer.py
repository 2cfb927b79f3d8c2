"""Tracers: they make the trace of an attempt the current one, and catch what the agent's libraries tell
OpenTelemetry.

This module is light: the OpenTelemetry SDK is loaded by `OtelTracer.setup` and nowhere before.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from raylight.errors import ConfigError, TracerError
from raylight.traces.context import AttemptTrace, current_trace, tracing
from raylight.types import Rollout, Span, TraceStatus

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

    from raylight.traces.export import AttemptExport
    from raylight.traces.otel import SpanCapture

EXPORT_TIMEOUT_S = 10.0
"""How long `teardown` waits until the last spans are exported."""

_LAST: ContextVar[AttemptTrace | None] = ContextVar("raylight_last_trace", default=None)
_SETUP = threading.Lock()


class TraceContext:
    """The block of a trace; enter it with `with` or with `async with`."""

    def __init__(self, inner: AbstractContextManager[AttemptTrace]) -> None:
        self._inner = inner

    def __enter__(self) -> AttemptTrace:
        return self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool | None:
        return self._inner.__exit__(kind, error, where)

    async def __aenter__(self) -> AttemptTrace:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> bool | None:
        return self.__exit__(kind, error, where)


class Tracer:
    """Base of the tracers. A tracer is its settings: it is pickled, travels to the runners, and is set up
    once in each process.

    The trace of an attempt is a context variable, so that any number of attempts run in one process and never
    mix spans.
    """

    def setup(self) -> None:
        """Make this process ready to be traced; again, it does nothing.

        Raises:
            TracerError: the process cannot be traced so.
        """

    def teardown(self) -> None:
        """Give back what `setup` took, within a deadline. It may block: an event loop calls it in a
        thread."""

    @contextlib.contextmanager
    def attempt(self, rollout: Rollout) -> Iterator[AttemptTrace]:
        """Trace the rollout's attempt while the block runs.

        The trace stays open afterwards, because hooks and rewards still add to it; whoever decides the
        attempt closes it.

        Raises:
            TracerError: the rollout has no attempt, so that its spans would belong to nothing.
        """
        if rollout.attempt is None:
            raise TracerError(
                f"rollout {rollout.rollout_id} has no attempt to trace; dequeue or start it first"
            )
        with self._current(AttemptTrace(rollout.rollout_id, rollout.attempt.attempt_id)) as trace:
            yield trace

    def trace_context(
        self, name: str | None = None, *, rollout_id: str | None = None, attempt_id: str | None = None
    ) -> TraceContext:
        """Trace a block by hand; it gives the `AttemptTrace`.

        Without ids, a block inside of an attempt adds to that attempt's trace; outside of any it has a trace
        with empty ids.

        Args:
            name: of a span around the block; None for no such span.
            rollout_id: rollout and
            attempt_id: attempt of the spans; both or neither.

        Raises:
            ConfigError: only one of the ids is given.
        """
        if (rollout_id is None) != (attempt_id is None):
            raise ConfigError("give trace_context both rollout_id and attempt_id, or neither")
        return TraceContext(self._by_hand(name, rollout_id, attempt_id))

    def get_last_trace(self) -> list[Span]:
        """Spans of the attempt that runs here, or else of the last one that ran in this context; empty if
        there was none."""
        trace = current_trace() or _LAST.get()
        return trace.spans if trace else []

    @contextlib.contextmanager
    def _by_hand(
        self, name: str | None, rollout_id: str | None, attempt_id: str | None
    ) -> Iterator[AttemptTrace]:
        outer = current_trace()
        if outer is not None and (
            rollout_id is None or (outer.rollout_id, outer.attempt_id) == (rollout_id, attempt_id)
        ):
            trace = outer  # a second trace here would keep spans from the one whose spans are stored
        else:
            trace = AttemptTrace(rollout_id or "", attempt_id or "")
        with self._current(trace), self._span(name, trace) if name else contextlib.nullcontext():
            yield trace

    @contextlib.contextmanager
    def _current(self, trace: AttemptTrace) -> Iterator[AttemptTrace]:
        self.setup()
        _LAST.set(trace)
        with tracing(trace):
            yield trace

    @contextlib.contextmanager
    def _span(self, name: str, trace: AttemptTrace) -> Iterator[None]:
        """A span around a block."""
        start, status = time.time(), TraceStatus(status_code="OK")
        try:
            yield
        except BaseException as error:
            status = TraceStatus(status_code="ERROR", description=type(error).__name__)
            raise
        finally:
            made: dict[str, Any] = {
                "trace_id": trace.trace_id,
                "status": status,
                "start_time": start,
                "end_time": time.time(),
            }
            trace.add(Span.from_attributes(name=name, attributes={}, **made))


class DummyTracer(Tracer):
    """Traces what is emitted by hand (rewards, messages, operations) and nothing else; it never loads
    OpenTelemetry."""


class OtelTracer(Tracer):
    """Traces every OpenTelemetry span that begins inside an attempt: those of any instrumented library, and
    the agent's own.

    It works with the global tracer provider: it installs one, or joins the SDK provider that is there. A span
    belongs to the attempt whose code starts it; in a thread of the agent's that knows only OpenTelemetry's
    context, to the attempt of its parent. Other spans are left alone. Nothing is sent while a span ends: it
    is converted (some 30 us) and kept.

    Spans may be exported to a collector too. They are sent in batches by a thread; a collector that is slow
    or down costs exported spans (logged by the SDK), never time of the agent or spans of the store. Every
    exported span has the resource attributes `agentlightning.rollout_id` and `agentlightning.attempt_id`, so
    that a collector shows an attempt as one resource, and so that raylight's own `/v1/traces` accepts them.

    Args:
        service_name: `service.name` of the provider that is installed; one that is there keeps its own.
        exporter: a class or function that makes a SpanExporter in each process
            (`functools.partial(OTLPSpanExporter, ...)`); not an exporter, because that holds connections and
            cannot travel to the runners.
        export_endpoint: instead, the URL of an OTLP/HTTP collector; `/v1/traces` is added to one without a
            path.
        headers: HTTP headers for `export_endpoint`.
        export_timeout: seconds that `teardown` waits for the last spans to be exported.

    Raises:
        ConfigError: the arguments contradict one another.
    """

    _capture: SpanCapture | None = None
    _export: AttemptExport | None = None
    _is_set_up = False

    def __init__(
        self,
        service_name: str = "raylight",
        exporter: Callable[[], SpanExporter] | None = None,
        *,
        export_endpoint: str | None = None,
        headers: Mapping[str, str] | None = None,
        export_timeout: float = EXPORT_TIMEOUT_S,
    ) -> None:
        if exporter is not None and not callable(exporter):
            raise ConfigError(
                f"exporter is a {type(exporter).__name__}; give a class or function that makes one in each "
                f"runner process, "
                "such as functools.partial(OTLPSpanExporter, endpoint=...)"
            )
        if exporter is not None and export_endpoint is not None:
            raise ConfigError("give either exporter or export_endpoint, not both")
        if headers is not None and export_endpoint is None:
            raise ConfigError("headers are sent to export_endpoint, which is not given")
        self.service_name = service_name
        self.export_endpoint = _traces_url(export_endpoint) if export_endpoint is not None else None
        self.export_timeout = export_timeout
        self._exporter = exporter
        self._headers = dict(headers or {})

    @property
    def failed(self) -> int:
        """Spans of this process that could not be converted; each was logged."""
        return self._capture.failed if self._capture else 0

    @property
    def truncated(self) -> int:
        """Spans of this process from which the provider's span limits cut attributes before they came
        here."""
        return self._capture.truncated if self._capture else 0

    def setup(self) -> None:
        """Make sure of a global tracer provider and hear its spans.

        Raises:
            TracerError: the global tracer provider is not the SDK's, or the SDK is disabled.
        """
        if self._is_set_up:
            return
        from raylight.traces.export import AttemptExport
        from raylight.traces.otel import process_capture

        with _SETUP:
            if self._is_set_up:
                return
            self._capture = process_capture(self.service_name)
            exporter = self._make_exporter()
            self._export = AttemptExport(exporter) if exporter else None
            self._capture.add_tracer(self._export)
            self._is_set_up = True

    def teardown(self) -> None:
        """Hear no more spans, and export what is left within `export_timeout` seconds; what is not exported
        then is dropped."""
        with _SETUP:
            if not self._is_set_up or self._capture is None:
                return
            self._is_set_up = False
            self._capture.remove_tracer(self._export)
            export, self._export = self._export, None
        if export is not None:
            export.close(self.export_timeout)

    def __getstate__(self) -> dict[str, Any]:
        return {
            key: value
            for key, value in vars(self).items()
            if key not in ("_capture", "_export", "_is_set_up")
        }

    @contextlib.contextmanager
    def _span(self, name: str, trace: AttemptTrace) -> Iterator[None]:
        from opentelemetry.trace import get_tracer

        with get_tracer("raylight").start_as_current_span(name):
            yield

    def _make_exporter(self) -> SpanExporter | None:
        if self._exporter is not None:
            return self._exporter()
        if self.export_endpoint is None:
            return None
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter(
            endpoint=self.export_endpoint, headers=self._headers, timeout=self.export_timeout
        )


def _traces_url(endpoint: str) -> str:
    """The URL that spans are posted to."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"export_endpoint {endpoint!r} is not an http(s) URL; give one such as http://collector:4318"
        )
    return urlunsplit(parts._replace(path="/v1/traces")) if parts.path in ("", "/") else endpoint
