"""Displays that are redrawn in place: in a terminal, and in the output of a notebook cell."""

from __future__ import annotations

import io
import threading
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from raylight._utils.printable import printable
from raylight.advisories import Advisory
from raylight.trainer.output.displays.progress import RunProgress
from raylight.trainer.output.displays.view import ProgressView, advisory_text
from raylight.trainer.output.loggers.protocol import Metrics

NOTEBOOK_WIDTH = 100
"""Characters of a line in a notebook."""
NOTEBOOK_HEIGHT = 40
NOTEBOOK_REFRESH_S = 0.5
NOTEBOOK_FORMAT = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;font-family:monospace">{code}</pre>'
)


class _ViewDisplay:
    """A display that shows a view of the run's progress. Notes are printed and stay; so are stages and
    advisories when the view no longer shows them."""

    def __init__(self, console: Console, progress: RunProgress) -> None:
        self._console, self._progress = console, progress
        self._view = ProgressView(progress)

    def stage(self, text: str) -> None:
        self._print_stage()
        self._progress.stage = printable(text)

    def progress(self, phase: str, done: int, total: int) -> None:
        self._progress.enter_phase(phase, done, total)

    def step(self, step: int, metrics: Metrics) -> None:
        self._print_stage()
        self._progress.add(step, metrics)

    def note(self, text: str) -> None:
        self._print(Text(printable(text), "yellow"))

    def advise(self, advisory: Advisory) -> None:
        self._print_advisory()
        self._progress.advisory = advisory

    def _print_stage(self) -> None:
        if self._progress.stage:
            self._print(Text(self._progress.stage, "dim"))

    def _print_advisory(self) -> None:
        if (last := self._progress.advisory) is not None:
            self._print(advisory_text(last))
        self._progress.advisory = None

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


class LiveDisplay(_ViewDisplay):
    """Shows the progress of a run in a terminal."""

    def __init__(self, console: Console, progress: RunProgress) -> None:
        super().__init__(console, progress)
        self._live = Live(self._view, console=console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._live.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._print_advisory()
        self._view.is_over = True
        self._live.__exit__(*error)


class NotebookDisplay(_ViewDisplay):
    """Shows the progress of a run in the output of a notebook cell."""

    def __init__(self, console: Console, progress: RunProgress) -> None:
        super().__init__(console, progress)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._refresh, name="raylight-display", daemon=True)
        self._shown: dict[str, str] = {}
        self._handle: Any = None

    def __enter__(self) -> Self:
        from IPython.display import display

        self._handle = display(self._render(), raw=True, display_id=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._thread.join()
        self._print_advisory()
        self._view.is_over = True
        self._update()

    def _refresh(self) -> None:
        while not self._ending.wait(NOTEBOOK_REFRESH_S):
            self._update()

    def _update(self) -> None:
        if (content := self._render()) != self._shown:
            self._shown = content
            self._handle.update(content, raw=True)

    def _render(self) -> dict[str, str]:
        """Return the view by MIME type."""
        console = Console(
            record=True,
            file=io.StringIO(),
            width=NOTEBOOK_WIDTH,
            height=NOTEBOOK_HEIGHT,
            force_jupyter=False,
        )
        console.print(self._view)
        html = console.export_html(code_format=NOTEBOOK_FORMAT, inline_styles=True, clear=False)
        return {"text/html": html, "text/plain": console.export_text()}
