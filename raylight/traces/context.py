"""The trace of the attempt that runs here: where emitters and tracers put their spans.

Laws: two attempts interleaved on one event loop, or in two threads, never mix spans, because the current trace is a context
variable; adding a span never waits and never fails the agent, and what does not fit is counted.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from contextvars import ContextVar

from raylight.types import Span

CAPACITY = 100_000
"""Spans of one attempt; further ones are dropped and counted."""


class AttemptTrace:
    """Spans of one attempt, in the order in which they ended. Thread-safe.

    Args:
        rollout_id: rollout and
        attempt_id: attempt that every added span is keyed to.
    """

    def __init__(self, rollout_id: str, attempt_id: str, capacity: int = CAPACITY) -> None:
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.trace_id = secrets.token_hex(16)
        """For spans that belong to no OpenTelemetry trace."""
        self.dropped = 0
        self.closed = False
        self._capacity = capacity
        self._spans: list[Span] = []
        self._sent = 0
        self._lock = (
            threading.RLock()
        )  # a span may end while garbage is collected, anywhere in this thread: also in here

    def add(self, span: Span) -> None:
        """Take a span in; after the end of the attempt, or beyond the capacity, it is counted and dropped."""
        with self._lock:
            if self.closed or len(self._spans) >= self._capacity:
                self.dropped += 1
                return
            self._spans.append(
                span.model_copy(update={"rollout_id": self.rollout_id, "attempt_id": self.attempt_id})
            )

    @property
    def spans(self) -> list[Span]:
        """All spans so far."""
        with self._lock:
            return list(self._spans)

    def take(self) -> list[Span]:
        """Spans added since the last call, to be sent to the store."""
        with self._lock:
            fresh = self._spans[self._sent :]
            self._sent = len(self._spans)
            return fresh

    def close(self) -> None:
        """The attempt is decided; what still runs of it changes nothing."""
        with self._lock:
            self.closed = True


_CURRENT: ContextVar[AttemptTrace | None] = ContextVar("raylight_trace", default=None)


def current_trace() -> AttemptTrace | None:
    """The trace of the attempt whose code runs here; None outside of any."""
    return _CURRENT.get()


@contextlib.contextmanager
def tracing(trace: AttemptTrace) -> Iterator[AttemptTrace]:
    """Make a trace the current one, in this context and in those made from it (tasks; threads by `copy_context().run`)."""
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)
