"""All metric loggers of a run, called as one."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from raylight.components import build_component
from raylight.errors import ConfigError, summarize_ray_error
from raylight.trainer.output.loggers.protocol import Display, MetricLogger, Metrics, SampledRollout
from raylight.trainer.output.loggers.tracker import FINISH_TIMEOUT_S, Tracker, TrackerError, TrackerThread
from raylight.types import JsonObject

logger = logging.getLogger(__name__)


class LoggerGroup:
    """The metric loggers of a run.

    Args:
        loggers: result of `find_loggers`.
        display: receives the report of a logger's first failure.
        history: rows of the steps that a resumed run keeps.
        finish_timeout_s: time in which trackers must take the rows that wait at the end.

    Raises:
        ConfigError: an entry cannot be constructed, or lacks a method.
    """

    def __init__(
        self,
        loggers: Iterable[object],
        folder: Path,
        display: Display,
        history: Sequence[Metrics],
        finish_timeout_s: float = FINISH_TIMEOUT_S,
    ) -> None:
        self._display, self._finish_timeout_s = display, finish_timeout_s
        self._loggers: list[MetricLogger | TrackerThread] = []
        self._failed: set[int] = set()
        self._finished = False
        for entry in loggers:
            built: Any = build_component(
                entry, object, "loggers", folder=folder, display=display, history=history
            )
            for method in ("start", "log", "finish"):
                if not callable(getattr(built, method, None)):
                    raise ConfigError(
                        f"loggers: {type(built).__name__} has no method {method}(); see "
                        "raylight.trainer.output.loggers.MetricLogger"
                    )
            self._loggers.append(TrackerThread(built) if isinstance(built, Tracker) else built)

    def start(self, config: JsonObject) -> None:
        self._call("start", config)

    def log(self, step: int, metrics: Metrics) -> None:
        self._call("log", step, metrics)

    @property
    def takes_rollouts(self) -> bool:
        """True if a logger receives rollouts."""
        return any(
            each.takes_rollouts if isinstance(each, TrackerThread) else hasattr(each, "rollouts")
            for each in self._loggers
        )

    def rollouts(self, step: int, table: list[SampledRollout]) -> None:
        """Give a few rollouts of the evaluation of a step to the loggers that receive them."""
        self._call("rollouts", step, table)

    def finish(self, failure: str | None = None) -> None:
        """Finish all loggers; a second call does nothing.

        Args:
            failure: reason why the run ended with an error.
        """
        if self._finished:
            return
        self._finished = True
        if failure is not None:
            self._call("fail", failure)
        threads = [each for each in self._loggers if isinstance(each, TrackerThread)]
        for each in threads:
            each.close(self._finish_timeout_s)
        self._call("finish")
        for loss in filter(None, (each.loss for each in threads)):
            self._display.note(loss)

    def _call(self, method: str, *args: object) -> None:
        for index, each in enumerate(self._loggers):
            if (function := getattr(each, method, None)) is None:
                continue
            try:
                function(*args)
            except (Exception, SystemExit) as error:  # some trackers end the process after an error
                self._report(index, error.method if isinstance(error, TrackerError) else method, error)

    def _report(self, index: int, method: str, error: BaseException) -> None:
        if index in self._failed:
            return
        self._failed.add(index)
        each = self._loggers[index]
        name = each.name if isinstance(each, TrackerThread) else type(each).__name__
        logger.warning("metric logger %s failed in %s()", name, method, exc_info=error)
        self._display.note(
            f"metric logger {name} failed in {method}(), and the run continues: "
            f"{summarize_ray_error(error)}. Further failures of it are not reported"
        )
