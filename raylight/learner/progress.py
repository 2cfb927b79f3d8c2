"""Progress of a rank's current call, which tells long work from a hang."""

from __future__ import annotations

import faulthandler
import time

DUMP_DELAY_S = 3.0
"""Seconds after the deadline of a call without progress at which the rank dumps its stacks to its log, if the
driver has not requested them. Such a call does not release the interpreter lock."""
MIN_INTERVAL_S = 1.0
"""Seconds between two changes of that deadline; each starts a thread."""
STDERR = 2


class ProgressClock:
    """Clock of the time since a rank last made progress.

    Work that may take long marks each of its parts: a micro-batch, an optimizer step, a layer group. Calls
    have no deadline of their own; a part that takes too long does.
    """

    def __init__(self) -> None:
        self._limit_s: float | None = None
        self._marked = self._armed = time.monotonic()

    def start(self, limit_s: float) -> None:
        """Begin a call whose parts may take `limit_s` seconds each."""
        self._limit_s, self._marked = limit_s, time.monotonic()
        self._arm()

    def mark(self) -> None:
        """Note that a part of the current call is done."""
        self._marked = time.monotonic()
        if self._limit_s is not None and self._marked - self._armed > MIN_INTERVAL_S:
            self._arm()

    def stop(self) -> None:
        """End the call."""
        self._limit_s = None
        faulthandler.cancel_dump_traceback_later()

    @property
    def idle_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._marked

    def _arm(self) -> None:
        assert self._limit_s is not None
        self._armed = self._marked
        faulthandler.dump_traceback_later(self._limit_s + DUMP_DELAY_S, file=STDERR)


CLOCK = ProgressClock()
"""The clock of this process, which executes one call at a time."""
