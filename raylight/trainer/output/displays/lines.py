"""Displays that print lines, for logs."""

from __future__ import annotations

from typing import Self

from rich.console import Console

from raylight._utils.printable import printable
from raylight.advisories import Advisory
from raylight.trainer.output.displays.progress import RunProgress, format_seconds
from raylight.trainer.output.displays.view import cell, columns_of, label
from raylight.trainer.output.loggers.protocol import Metrics


class SilentDisplay:
    """Prints notes and advisories only."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def stage(self, text: str) -> None:
        pass

    def progress(self, phase: str, done: int, total: int) -> None:
        """Print nothing: each update would be a separate line."""

    def step(self, step: int, metrics: Metrics) -> None:
        pass

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def advise(self, advisory: Advisory) -> None:
        self._print(f"{advisory.level}: {advisory}")

    def _print(self, text: str) -> None:
        self._console.print(printable(text), markup=False, highlight=False, soft_wrap=True)


class PlainDisplay(SilentDisplay):
    """Prints one line per step."""

    def __init__(self, console: Console, progress: RunProgress) -> None:
        super().__init__(console)
        self._progress = progress

    def stage(self, text: str) -> None:
        self._print(text)

    def step(self, step: int, metrics: Metrics) -> None:
        self._progress.add(step, metrics)
        columns = columns_of([metrics])
        shown = [f"{name} {cell(metrics, key, form)}" for name, key, form in columns if key in metrics]
        if (left := self._progress.seconds_left) is not None and step < self._progress.total:
            shown.append(f"about {format_seconds(left)} left")
        total = f"/{self._progress.total}" if self._progress.total else ""
        self._print(f"{label(step, metrics)}{total}  " + "  ".join(shown))
