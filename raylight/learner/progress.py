"""Progress of a rank's current calls, which tells long work from a hang."""

from __future__ import annotations

import faulthandler
import threading
import time
from dataclasses import dataclass

DUMP_DELAY_S = 3.0
"""Seconds after the deadline of a call without progress at which the rank dumps its stacks to its log, if the
driver has not requested them. Such a call does not release the interpreter lock."""
MIN_INTERVAL_S = 1.0
"""Seconds between two changes of that deadline; each starts a thread."""
STDERR = 2


@dataclass
class _WatchedCall:
    thread: int
    limit_s: float
    marked: float


class ProgressClock:
    """Clock of the time since a rank's calls last made progress. Each call runs in a thread of its own.

    Work that may take long marks each of its parts: a micro-batch, an optimizer step, a layer group. Calls
    have no deadline of their own; a part that takes too long does.
    """

    def __init__(self) -> None:
        self._calls: dict[str, _WatchedCall] = {}
        self._lock = threading.Lock()
        self._last = self._armed = time.monotonic()

    def start(self, name: str, limit_s: float) -> None:
        """Begin a call in this thread whose parts may take `limit_s` seconds each."""
        with self._lock:
            self._last = time.monotonic()
            self._calls[name] = _WatchedCall(threading.get_ident(), limit_s, self._last)
            self._arm()

    def mark(self) -> None:
        """Note that a part of this thread's call is done."""
        thread = threading.get_ident()
        with self._lock:
            self._last = time.monotonic()
            for call in self._calls.values():
                if call.thread == thread:
                    call.marked = self._last
            if self._calls and self._last - self._armed > MIN_INTERVAL_S:
                self._arm()

    def stop(self, name: str) -> None:
        """End a call, or stop watching it."""
        with self._lock:
            self._last = time.monotonic()
            self._calls.pop(name, None)
            self._arm()

    def thread_of(self, name: str) -> int | None:
        """Return the identifier of the thread that runs a call; None if it does not run."""
        call = self._calls.get(name)
        return call.thread if call else None

    def idle_s(self, name: str) -> float:
        """Return the seconds since a call last made progress; of one that does not run, since any did."""
        call = self._calls.get(name)
        return time.monotonic() - (call.marked if call else self._last)

    def _arm(self) -> None:
        """Dump the stacks when the first deadline has passed; never if no call is watched."""
        self._armed = time.monotonic()
        if not self._calls:
            faulthandler.cancel_dump_traceback_later()
            return
        left = min(call.marked + call.limit_s for call in self._calls.values()) - self._armed
        faulthandler.dump_traceback_later(max(left, 0.0) + DUMP_DELAY_S, file=STDERR)


CLOCK = ProgressClock()
"""The clock of this process."""
