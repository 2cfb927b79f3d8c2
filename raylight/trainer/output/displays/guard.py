"""A display whose failures (a closed terminal, a broken pipe) do not end the run."""

from __future__ import annotations

import logging
from typing import Protocol, Self

from raylight.advisories import Advisory
from raylight.trainer.output.loggers.protocol import Display, Metrics

logger = logging.getLogger(__name__)


class OpenDisplay(Display, Protocol):
    """A display that is opened and closed."""

    def __enter__(self) -> object: ...

    def __exit__(self, *error: object) -> None: ...


class GuardedDisplay:
    """Passes everything on to another display until that fails, which is logged; then only closes it."""

    def __init__(self, display: OpenDisplay) -> None:
        self._display = display
        self._failed = False

    def __enter__(self) -> Self:
        self._call("__enter__")
        return self

    def __exit__(self, *error: object) -> None:
        self._try("__exit__", *error)  # even after a failure: it ends threads and shows the cursor again

    def stage(self, text: str) -> None:
        self._call("stage", text)

    def progress(self, phase: str, done: int, total: int) -> None:
        self._call("progress", phase, done, total)

    def step(self, step: int, metrics: Metrics) -> None:
        self._call("step", step, metrics)

    def note(self, text: str) -> None:
        self._call("note", text)

    def advise(self, advisory: Advisory) -> None:
        self._call("advise", advisory)

    def _call(self, method: str, *args: object) -> None:
        if not self._failed:
            self._try(method, *args)

    def _try(self, method: str, *args: object) -> None:
        try:
            getattr(self._display, method)(*args)
        except (Exception, SystemExit):  # rich exits when its pipe is closed
            if not self._failed:
                logger.warning("the run continues without showing its progress", exc_info=True)
            self._failed = True
