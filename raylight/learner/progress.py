"""Progress of a rank's current calls, which distinguishes long work from a hang, and a hang's stacks."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback
from dataclasses import dataclass

DUMP_DELAY_S = 3.0
"""Seconds after the deadline of a call without progress at which the rank dumps its stacks to its log, if the
driver has not requested them. Such a call does not release the interpreter lock."""
MIN_INTERVAL_S = 1.0
"""Seconds between two changes of that deadline; each starts a thread."""
STDERR = 2
PACKAGE = "raylight"
SUMMARY_FRAMES = 3
"""Frames of raylight in a summary of a stack."""


@dataclass
class _WatchedCall:
    thread: int
    limit_s: float
    marked: float


class ProgressClock:
    """Clock of the time since a rank's calls last made progress. Each call runs in a separate thread.

    Work that may take long marks each of its parts: a micro-batch, an optimizer step, a layer group. Calls
    have no separate deadline; a part that takes too long does.
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


@dataclass(frozen=True)
class StackDump:
    """Stacks of the threads of a process at one moment."""

    text: str
    """Stacks of all threads, each with its innermost call last."""
    summary: str
    """Innermost frames of the requested thread; empty if it does not exist."""


def dump_stacks(thread: int | None) -> StackDump:
    """Dump the stacks of this process.

    Args:
        thread: identifier of the thread to summarize; None for no summary.
    """
    frames = sys._current_frames()
    names = {known.ident: known.name for known in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames.items()
    ]
    frame = frames.get(thread) if thread is not None else None
    return StackDump(
        "\n".join(parts), _summarize(traceback.extract_stack(frame)) if frame is not None else ""
    )


def _summarize(stack: traceback.StackSummary) -> str:
    """Return the last frames of raylight (without comprehensions) and the innermost frame."""
    own = [frame for frame in stack if f"/{PACKAGE}/" in frame.filename and frame.name[0] != "<"]
    shown = own[-SUMMARY_FRAMES:]
    return " > ".join(_format(frame) for frame in shown + ([] if stack[-1] in shown else [stack[-1]]))


def _format(frame: traceback.FrameSummary) -> str:
    """Format a frame with its path relative to the package or site-packages."""
    root = next((top for top in (PACKAGE, "site-packages") if f"/{top}/" in frame.filename), "")
    path = frame.filename.rpartition(f"/{root}/")[2] if root else frame.filename
    return f"{path}:{frame.lineno} ({frame.name})"
