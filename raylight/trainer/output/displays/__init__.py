"""Displays of a run: a view that is redrawn in a terminal and in a notebook, and plain lines elsewhere."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from raylight.trainer.output.displays.guard import GuardedDisplay, OpenDisplay
from raylight.trainer.output.displays.lines import PlainDisplay, SilentDisplay
from raylight.trainer.output.displays.live import LiveDisplay, NotebookDisplay
from raylight.trainer.output.displays.progress import RunProgress


def make_display(progress: bool, total: int = 0, folder: Path | None = None) -> GuardedDisplay:
    """Return a display for standard output. A run survives its failures.

    Args:
        progress: False shows notes only.
        total: planned number of steps; 0 if there are none.
        folder: the run directory, if the run has one.
    """
    return GuardedDisplay(_choose(Console(), progress, total, folder))


def _choose(console: Console, progress: bool, total: int, folder: Path | None) -> OpenDisplay:
    if not progress:
        return SilentDisplay(console)
    if folder is not None and folder.is_relative_to(Path.cwd()):
        folder = folder.relative_to(Path.cwd())
    state = RunProgress(total, None if folder is None else str(folder))
    if console.is_jupyter:
        return NotebookDisplay(console, state)
    return LiveDisplay(console, state) if console.is_terminal else PlainDisplay(console, state)
