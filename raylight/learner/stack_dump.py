"""Stack dump of a process's threads, for diagnosing a hung rank."""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass

PACKAGE = "raylight"
SUMMARY_FRAMES = 3
"""Frames of raylight in a summary."""


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
