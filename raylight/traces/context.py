"""The trace of the running attempt, to which emitters and tracers add spans.

Laws: two attempts interleaved on one event loop, or in two threads, never mix spans, because the current
trace is a context variable. Adding a span never blocks and never fails the agent; spans over the capacity are
counted.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from contextvars import ContextVar

from raylight.types import Span

CAPACITY = 100_000
"""Maximum number of spans of one attempt. Further ones are dropped and counted."""


class AttemptTrace:
    """Spans of one attempt, in the order in which they ended. Thread-safe.

    Args:
        rollout_id: id of the rollout, given to every added span.
        attempt_id: id of the attempt, given to every added span.
        capacity: maximum number of spans.
    """

    def __init__(self, rollout_id: str, attempt_id: str, capacity: int = CAPACITY) -> None:
        self.rollout_id = rollout_id
        self.attempt_id = attempt_id
        self.trace_id = secrets.token_hex(16)
        """Trace id of spans that belong to no OpenTelemetry trace."""
        self.dropped = 0
        self.closed = False
        self._capacity = capacity
        self._spans: list[Span] = []
        self._sent = 0
        # reentrant: garbage collection may end a span at any point of this thread, also while it holds the
        # lock
        self._lock = threading.RLock()

    def add(self, span: Span) -> None:
        """Add a span. After the end of the attempt, or beyond the capacity, it is dropped and counted."""
        with self._lock:
            if self.closed or len(self._spans) >= self._capacity:
                self.dropped += 1
                return
            self._spans.append(
                span.model_copy(update={"rollout_id": self.rollout_id, "attempt_id": self.attempt_id})
            )

    @property
    def spans(self) -> list[Span]:
        """All spans added so far."""
        with self._lock:
            return list(self._spans)

    def take(self) -> list[Span]:
        """Return the spans added since the last call, to be sent to the store."""
        with self._lock:
            fresh = self._spans[self._sent :]
            self._sent = len(self._spans)
            return fresh

    def close(self) -> None:
        """Reject further spans, because the attempt is decided."""
        with self._lock:
            self.closed = True


_CURRENT: ContextVar[AttemptTrace | None] = ContextVar("raylight_trace", default=None)


def current_trace() -> AttemptTrace | None:
    """Return the trace of the running attempt; None outside an attempt."""
    return _CURRENT.get()


@contextlib.contextmanager
def tracing(trace: AttemptTrace) -> Iterator[AttemptTrace]:
    """Make a trace the current one, in this context and in its copies (such as those of tasks)."""
    token = _CURRENT.set(trace)
    try:
        yield trace
    finally:
        _CURRENT.reset(token)
