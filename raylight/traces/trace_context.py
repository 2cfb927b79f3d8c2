"""Blocks that are traced by hand, outside the runner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Protocol

from raylight.errors import ConfigError
from raylight.traces.context import SEND_BATCH, AttemptTrace
from raylight.types import Span


class SpanStore(Protocol):
    """Protocol of stores that spans are written to, such as a StoreClient."""

    async def add_many_spans(self, spans: Sequence[Span]) -> Any: ...


class TraceContext:
    """Context manager of a traced block, for `async with`, and for `with` if there is no store.

    Args:
        trace: receives the spans.
        current: makes the trace the current one.
        recorder: returns the object that `with ... as` gives, once the trace is the current one.
        store: receives the spans when the block ends. None: none does.
    """

    def __init__(
        self,
        trace: AttemptTrace,
        current: AbstractContextManager[Any],
        recorder: Callable[[], Any],
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

    def _enter(self) -> Any:
        self._stack.enter_context(self._current)
        return self._recorder()
