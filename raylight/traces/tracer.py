"""Tracers: they set an attempt's trace, and record the OpenTelemetry spans of the agent's libraries.

This module is light: only `OtelTracer.setup` imports the OpenTelemetry SDK.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit, urlunsplit

from raylight.errors import ConfigError, TracerError
from raylight.traces.context import SEND_BATCH, AttemptTrace, current_trace, record_span, tracing
from raylight.types import Attributes, Rollout, Span, SpanCoreFields, TraceStatus

if TYPE_CHECKING:
    from langchain_core.callbacks.base import BaseCallbackHandler
    from opentelemetry.sdk.trace.export import SpanExporter

    from raylight.traces.otel import AttemptExport, SpanCapture

EXPORT_TIMEOUT_S = 10.0
"""Seconds that `teardown` waits for the export of the last spans."""

_LAST: ContextVar[AttemptTrace | None] = ContextVar("raylight_last_trace", default=None)
_ACTIVE: ContextVar[Tracer | None] = ContextVar("raylight_active_tracer", default=None)
_SETUP_LOCK = threading.Lock()
Result = TypeVar("Result")


def get_active_tracer() -> Tracer | None:
    """Return the tracer of the running attempt or of the traced block; None outside of both."""
    return _ACTIVE.get()


class Tracer:
    """Base class of tracers.

    A tracer holds settings only: it is pickled, sent to the runners, and set up once in each process. The
    trace of an attempt is a context variable, so any number of attempts can run in one process without mixing
    spans.
    """

    _store: SpanStore | None = None
    """Store of `lifespan`."""
    _is_set_up = False
    _process_state = frozenset({"_store", "_is_set_up"})
    """Attributes that stay in this process when the tracer is pickled."""

    def setup(self) -> None:
        """Prepare this process for tracing. A second call does nothing.

        Raises:
            TracerError: the process cannot be traced with these settings.
        """

    def teardown(self) -> None:
        """Undo `setup`, within a deadline. It may block, so event loops call it in a thread."""

    @contextlib.contextmanager
    def attempt(self, rollout: Rollout) -> Iterator[AttemptTrace]:
        """Trace the rollout's attempt while the block runs.

        The trace stays open afterwards, because hooks and rewards still add spans. The caller that decides
        the attempt closes it.

        Raises:
            TracerError: the rollout has no attempt.
        """
        if rollout.attempt is None:
            raise TracerError(
                f"rollout {rollout.rollout_id} has no attempt to trace; dequeue the rollout or start an "
                f"attempt first"
            )
        with self._current(AttemptTrace(rollout.rollout_id, rollout.attempt.attempt_id)) as trace:
            yield trace

    def trace_context(
        self,
        name: str | None = None,
        *,
        store: SpanStore | None = None,
        rollout_id: str | None = None,
        attempt_id: str | None = None,
    ) -> TraceContext:
        """Return a context manager that traces a block, for use outside the runner.

        Without ids, a block inside an attempt adds to that attempt's trace; outside an attempt its trace has
        empty ids. `get_last_trace` returns its spans. `with ... as` gives an OpenTelemetry tracer if this
        tracer records its spans, else this tracer.

        Args:
            name: name of the block, for the reader of the code; it adds no span.
            store: store that receives the spans when the block ends; requires the ids and `async with`. None:
                the store of `lifespan`, if there is one.
            rollout_id: id of the rollout of the spans; requires `attempt_id`.
            attempt_id: id of the attempt of the spans; requires `rollout_id`.

        Raises:
            ConfigError: only one of the ids is given, or a store without ids.
        """
        if (rollout_id is None) != (attempt_id is None):
            raise ConfigError(
                "trace_context needs both rollout_id and attempt_id, or neither; pass the missing one"
            )
        if store is not None and rollout_id is None:
            raise ConfigError(
                "trace_context has a store, but no rollout_id and attempt_id under which it keeps the spans; "
                "pass the ids of store.start_rollout(...)"
            )
        outer = current_trace()
        if (
            outer is not None
            and rollout_id in (None, outer.rollout_id)
            and attempt_id in (None, outer.attempt_id)
        ):
            # reuse it: only the attempt's own trace is stored, and by the runner
            return TraceContext(outer, self._current(outer), self._recorder, None)
        trace = AttemptTrace(rollout_id or "", attempt_id or "")
        target = (store or self._store) if rollout_id is not None else None
        return TraceContext(trace, self._current(trace), self._recorder, target)

    @contextlib.contextmanager
    def lifespan(self, store: SpanStore | None = None) -> Iterator[None]:
        """Set the tracer up for a block, and tear it down afterwards unless it was set up before.

        Args:
            store: store that receives the spans of each `trace_context` with ids in the block. None: the
                store of the `lifespan` around this one, if there is one.
        """
        was_set_up = self._is_set_up or get_active_tracer() is self
        self.setup()
        outer, self._store = self._store, store or self._store
        try:
            yield
        finally:
            self._store = outer
            if not was_set_up:
                self.teardown()

    def trace_run(self, function: Callable[..., Result], *args: object, **kwargs: object) -> Result:
        """Call a function in a `trace_context`, and return its result."""
        with self.trace_context():
            return function(*args, **kwargs)

    async def trace_run_async(
        self, function: Callable[..., Awaitable[Result]], *args: object, **kwargs: object
    ) -> Result:
        """Await a coroutine function in a `trace_context`, and return its result."""
        async with self.trace_context():
            return await function(*args, **kwargs)

    def create_span(
        self,
        name: str,
        attributes: Attributes | None = None,
        timestamp: float | None = None,
        status: TraceStatus | None = None,
    ) -> SpanCoreFields:
        """Record a span that starts and ends at one moment; outside an attempt only return its fields.

        Args:
            timestamp: seconds since the epoch. None: now.
            status: outcome. None: OK.
        """
        return record_span(name, dict(attributes or {}), time_s=timestamp, status=status)

    def get_langchain_handler(self) -> BaseCallbackHandler:
        """Return a LangChain callback handler that records chains, LangGraph's nodes, tools and model calls.

        It names the agent of each call: the node of LangGraph, or the chain, that made it.

        Raises:
            TracerError: langchain-core is not installed.
        """
        try:
            from raylight.traces.langchain_handler import LangChainHandler
        except ImportError as error:
            raise TracerError(
                f"the LangChain handler cannot be created: {error}; pip install langchain-core"
            ) from error
        return LangChainHandler()

    def get_last_trace(self) -> list[Span]:
        """Return the spans of the running attempt, else of the last one in this context, else none."""
        trace = current_trace() or _LAST.get()
        return trace.spans if trace else []

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in vars(self).items() if key not in self._process_state}

    @contextlib.contextmanager
    def _current(self, trace: AttemptTrace) -> Iterator[AttemptTrace]:
        self.setup()
        _LAST.set(trace)
        outer = _ACTIVE.set(self)
        try:
            with tracing(trace):
                yield trace
        finally:
            _ACTIVE.reset(outer)

    def _recorder(self) -> object:
        """Return the object with which the code of a traced block records spans."""
        return self


class DummyTracer(Tracer):
    """Tracer of emitted spans only (rewards, messages, operations). It never imports OpenTelemetry."""


class OtelTracer(Tracer):
    """Tracer of all OpenTelemetry spans that start inside an attempt, of libraries and of the agent.

    It uses the global tracer provider: the SDK provider that is installed, or else one that it installs. A
    span belongs to the attempt whose code starts it; in a thread of the agent's that has only OpenTelemetry's
    context, to the attempt of its parent. Other spans are ignored. When a span ends, it is converted (about
    30 us) and kept; nothing is sent.

    Spans may also be exported to a collector, in batches and by a thread. A slow or unreachable collector
    loses exported spans (logged by the SDK), but never delays the agent or loses spans of the store. Every
    exported span has the resource attributes `agentlightning.rollout_id` and `agentlightning.attempt_id`, so
    a collector shows an attempt as one resource, and raylight's own `/v1/traces` accepts the spans.

    Args:
        service_name: `service.name` of the provider, if raylight installs it.
        exporter: class or function that creates a SpanExporter in each process
            (`functools.partial(OTLPSpanExporter, ...)`). An exporter itself holds connections and cannot be
            pickled.
        export_endpoint: URL of an OTLP/HTTP collector, instead of `exporter`. `/v1/traces` is appended to a
            URL without a path.
        headers: HTTP headers for `export_endpoint`.
        export_timeout: seconds that `teardown` waits for the export of the last spans.

    Raises:
        ConfigError: the arguments contradict one another, or `export_endpoint` is not an http(s) URL.
    """

    _capture: SpanCapture | None = None
    _export: AttemptExport | None = None
    _process_state = Tracer._process_state | {"_capture", "_export"}

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
                f"exporter is a {type(exporter).__name__}; give a class or function that creates one in "
                "each runner process, such as functools.partial(OTLPSpanExporter, endpoint=...)"
            )
        if exporter is not None and export_endpoint is not None:
            raise ConfigError("exporter and export_endpoint are both given; give one of them")
        if headers is not None and export_endpoint is None:
            raise ConfigError(
                "headers are given without export_endpoint, to which they are sent; give its URL"
            )
        self.service_name = service_name
        self.export_endpoint = _traces_url(export_endpoint) if export_endpoint is not None else None
        self.export_timeout = export_timeout
        self._exporter = exporter
        self._headers = dict(headers or {})

    @property
    def failed(self) -> int:
        """Number of spans of this process that could not be converted; each was logged."""
        return self._capture.failed if self._capture else 0

    @property
    def truncated(self) -> int:
        """Number of spans of this process that lost attributes to the provider's span limits."""
        return self._capture.truncated if self._capture else 0

    def setup(self) -> None:
        """Install a global tracer provider if there is none, and start to record its spans.

        Raises:
            TracerError: the global tracer provider is not the SDK's, or the SDK is disabled.
        """
        if self._is_set_up:
            return
        from raylight.traces.otel import AttemptExport, process_capture

        with _SETUP_LOCK:
            if self._is_set_up:
                return
            self._capture = process_capture(self.service_name)
            exporter = self._make_exporter()
            self._export = AttemptExport(exporter) if exporter else None
            self._capture.add_tracer(self._export)
            self._is_set_up = True

    def teardown(self) -> None:
        """Stop recording, export the remaining spans, and drop those left after `export_timeout` seconds."""
        with _SETUP_LOCK:
            if not self._is_set_up or self._capture is None:
                return
            self._is_set_up = False
            self._capture.remove_tracer(self._export)
            export, self._export = self._export, None
        if export is not None:
            export.close(self.export_timeout)

    def _recorder(self) -> object:
        from opentelemetry.trace import get_tracer

        return get_tracer("raylight")

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
    """Return the URL to which spans are posted."""
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"export_endpoint {endpoint!r} is not an http(s) URL; give one such as http://collector:4318"
        )
    return urlunsplit(parts._replace(path="/v1/traces")) if parts.path in ("", "/") else endpoint


class SpanStore(Protocol):
    """Protocol of stores that spans are written to, such as a StoreClient."""

    async def add_many_spans(self, spans: Sequence[Span]) -> object: ...


class TraceContext:
    """Context manager of a traced block, for `async with`, and for `with` without a store.

    Args:
        trace: receives the spans.
        current: makes the trace the current one.
        recorder: returns the object that `with ... as` gives, once the trace is the current one.
        store: receives the spans when the block ends. None: none does.
    """

    def __init__(
        self,
        trace: AttemptTrace,
        current: AbstractContextManager[object],
        recorder: Callable[[], object],
        store: SpanStore | None,
    ) -> None:
        self._trace = trace
        self._current = current
        self._recorder = recorder
        self._store = store
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Any:
        if self._store is not None:
            raise ConfigError(
                "a traced block whose spans go to a store waits for the store; write "
                "`async with tracer.trace_context(...)`"
            )
        return self._enter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    async def __aenter__(self) -> Any:
        return self._enter()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()
        if self._store is None:
            return
        while spans := self._trace.take(SEND_BATCH):
            await self._store.add_many_spans(spans)
        if kind is None and (lost := self._trace.reward_error):
            raise lost

    def _enter(self) -> object:
        self._stack.enter_context(self._current)
        return self._recorder()
