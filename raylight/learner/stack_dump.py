"""What the threads of a process are at, for whoever waits for it in vain."""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass

OURS = "raylight"
SHOWN = 3
"""Frames of raylight in a summary."""


@dataclass(frozen=True)
class Stacks:
    """The stacks of a process at one moment."""

    text: str
    """Of all threads, each with its innermost call last."""
    summary: str
    """Innermost frames of the thread that was asked about; empty if there is none."""


def take_stacks(thread: int | None) -> Stacks:
    """The stacks of this process.

    Args:
        thread: ident of the thread that the summary is of.
    """
    frames = sys._current_frames()
    names = {known.ident: known.name for known in threading.enumerate()}
    parts = [
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in frames.items()
    ]
    found = frames.get(thread) if thread is not None else None
    return Stacks("\n".join(parts), _summary(traceback.extract_stack(found)) if found is not None else "")


def _summary(stack: traceback.StackSummary) -> str:
    """The last frames of raylight, and the one that they have led to."""
    ours = [frame for frame in stack if f"/{OURS}/" in frame.filename and frame.name[0] != "<"][
        -SHOWN:
    ]  # no comprehensions
    return " > ".join(_place(frame) for frame in ours + ([] if stack[-1] in ours else [stack[-1]]))


def _place(frame: traceback.FrameSummary) -> str:
    home = next((top for top in (OURS, "site-packages") if f"/{top}/" in frame.filename), "")
    name = frame.filename.rpartition(f"/{home}/")[2] if home else frame.filename
    return f"{name}:{frame.lineno} ({frame.name})"
