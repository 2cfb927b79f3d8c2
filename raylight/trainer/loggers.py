"""Metric loggers: receivers of the metrics of every step.

A logger is one class with the three methods of `MetricLogger`. `Trainer(loggers=[...])` takes the names in
`LOGGERS`, instances, classes, dotted names such as "package.module:MyLogger", and dicts of such a name as
`type` with arguments. A constructor that has a parameter `folder`, `display` or `history` receives the run
directory, the Display of the run, and the rows of the steps that a resumed run keeps.

A logger that raises is reported once and does not end the run.
"""

from __future__ import annotations

import difflib
import errno
import json
import logging
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

from raylight.components import build_component, import_dotted_name
from raylight.errors import ConfigError, summarize_ray_error
from raylight.files import write_atomic

Metrics = dict[str, float]

METRICS_FILE = "metrics.jsonl"
PLOT_FILE = "reward.png"
VAL_STEP = "val/step"
"""Metric of an evaluation beside training: the step whose weights were evaluated."""
PLOTTED = (
    "step",
    VAL_STEP,
    "train/reward",
    "train/reward_std",
    "train/rollouts",
    "val/reward",
    "val/reward_error",
    "time/rollout_s",
    "time/update_s",
    "time/sync_s",
)
"""Metrics that `plot_rewards` reads."""
logger = logging.getLogger(__name__)


class MetricLogger(Protocol):
    """A receiver of metrics. It is called in the driver, in the order start, log for each step, finish."""

    def start(self, config: dict[str, Any]) -> None:
        """Begin a run, or continue one that is resumed.

        Args:
            config: the content of `config.yaml`.
        """
        ...

    def log(self, step: int, metrics: Metrics) -> None:
        """Receive the metrics of a step by name; step 0 is the evaluation before training. Values may be
        NaN.

        Metrics with `val/step` are those of an evaluation beside training alone: of the step `val/step`, when
        `step` was the last one.
        """
        ...

    def finish(self) -> None:
        """End the run, also after an error."""
        ...


class Display(Protocol):
    """Output of a run in progress to a person."""

    def stage(self, text: str) -> None:
        """Show what the run is doing now."""
        ...

    def progress(self, text: str) -> None:
        """Show progress within a stage, where output can be redrawn."""
        ...

    def step(self, step: int, metrics: Metrics) -> None:
        """Show the metrics of a step."""
        ...

    def note(self, text: str) -> None:
        """Show a message that stays."""
        ...


class ConsoleLogger:
    """Shows each step on the run's display."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def start(self, config: dict[str, Any]) -> None:
        pass

    def log(self, step: int, metrics: Metrics) -> None:
        self._display.step(step, metrics)

    def finish(self) -> None:
        pass


class JsonlLogger:
    """Writes one JSON object per step to `metrics.jsonl`; a resumed run keeps the rows up to its starting
    point.

    A row that cannot be written, such as on a full disk, leaves no part of itself in the file, and is written
    with the next one.
    """

    def __init__(self, folder: Path, history: Sequence[Metrics] = ()) -> None:
        self._file = folder / METRICS_FILE
        self._history = history
        self._unwritten = b""

    def start(self, config: dict[str, Any]) -> None:
        write_atomic(self._file, "".join(map(_json_line, self._history)))
        self._history = ()

    def log(self, step: int, metrics: Metrics) -> None:
        self._unwritten += _json_line({"step": step, **metrics}).encode()
        self._write()

    def finish(self) -> None:
        if self._unwritten:
            self._write()

    def _write(self) -> None:
        with self._file.open("ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                if file.write(self._unwritten) != len(self._unwritten):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._file))
            except OSError:
                file.truncate(size)
                raise
        self._unwritten = b""


class PlotLogger:
    """Draws `reward.png` at the end of the run: rewards and seconds over steps."""

    def __init__(self, folder: Path, history: Sequence[Metrics] = ()) -> None:
        self._folder = folder
        self._rows = [_plotted(row) for row in history]

    def start(self, config: dict[str, Any]) -> None:
        pass

    def log(self, step: int, metrics: Metrics) -> None:
        self._rows.append(_plotted({"step": step, **metrics}))

    def finish(self) -> None:
        if not self._rows:
            return
        from raylight.trainer.plot import plot_rewards

        best = self._folder / "best" / "best.json"
        plot_rewards(
            self._rows, self._folder / PLOT_FILE, json.loads(best.read_text()) if best.exists() else None
        )


LOGGERS: dict[str, type] = {"console": ConsoleLogger, "jsonl": JsonlLogger, "plot": PlotLogger}
"""Loggers that have a short name."""
DEFAULT_LOGGERS = ("console", "jsonl", "plot")


def find_loggers(loggers: Iterable[Any] | None) -> tuple[Any, ...]:
    """Replace names by what they name, so that a wrong name is an error before the run starts.

    Args:
        loggers: as for `Trainer(loggers=...)`; None means `DEFAULT_LOGGERS`.

    Raises:
        ConfigError: `loggers` is not a list, or an entry names nothing.
    """
    if loggers is None:
        loggers = DEFAULT_LOGGERS
    if isinstance(loggers, str | dict) or not isinstance(loggers, Iterable):
        raise ConfigError(f"loggers: {loggers!r:.80} is not a list; give a list such as ['console', 'jsonl']")
    return tuple(_find(entry) for entry in loggers)


def _find(entry: Any) -> Any:
    if isinstance(entry, dict) and isinstance(entry.get("type"), str):
        return entry | {"type": _find(entry["type"])}
    if not isinstance(entry, str):
        return entry
    if entry in LOGGERS:
        return LOGGERS[entry]
    if "." in entry or ":" in entry:
        return import_dotted_name(entry, "loggers")
    nearest = difflib.get_close_matches(entry, LOGGERS, n=3, cutoff=0.5) or LOGGERS
    raise ConfigError(
        f"loggers: there is no logger {entry!r}; the nearest are: {', '.join(nearest)}. A logger of your own "
        "has a dotted name: package.module:MyLogger"
    )


def _plotted(row: Metrics) -> Metrics:
    return {name: row[name] for name in PLOTTED if name in row}


class LoggerGroup:
    """The metric loggers of a run.

    Args:
        loggers: result of `find_loggers`.
        display: receives the report of a logger's first failure.
        history: rows of the steps that a resumed run keeps.

    Raises:
        ConfigError: an entry cannot be constructed, or lacks a method.
    """

    def __init__(
        self, loggers: Iterable[Any], folder: Path, display: Display, history: Sequence[Metrics]
    ) -> None:
        self._display = display
        self._loggers: list[MetricLogger] = []
        self._failed: set[int] = set()
        self._finished = False
        for entry in loggers:
            built = build_component(entry, object, "loggers", folder=folder, display=display, history=history)
            for method in ("start", "log", "finish"):
                if not callable(getattr(built, method, None)):
                    raise ConfigError(
                        f"loggers: {type(built).__name__} has no method {method}(); see "
                        "raylight.trainer.loggers.MetricLogger"
                    )
            self._loggers.append(built)  # type: ignore[arg-type]

    def start(self, config: dict[str, Any]) -> None:
        self._call("start", config)

    def log(self, step: int, metrics: Metrics) -> None:
        self._call("log", step, metrics)

    def finish(self) -> None:
        """Finish all loggers; a second call does nothing."""
        if not self._finished:
            self._finished = True
            self._call("finish")

    def _call(self, method: str, *args: Any) -> None:
        for index, each in enumerate(self._loggers):
            try:
                getattr(each, method)(*args)
            except Exception as error:
                if index in self._failed:
                    continue
                self._failed.add(index)
                name = type(each).__name__
                logger.warning("metric logger %s failed in %s()", name, method, exc_info=True)
                self._display.note(
                    f"metric logger {name} failed in {method}(), and the run continues: "
                    f"{summarize_ray_error(error)}. Further failures of it are not reported"
                )


def read_history(folder: Path, last_step: int | None) -> list[Metrics]:
    """Return the rows of `metrics.jsonl` up to a step; none if `last_step` is None or there is no file.

    The last line may be incomplete, if the run was killed while it was written.
    """
    file = folder / METRICS_FILE
    if last_step is None or not file.exists():
        return []
    rows = [
        {name: math.nan if value is None else value for name, value in json.loads(line).items()}
        for line in file.read_text().split("\n")[:-1]
    ]
    kept = [row for row in rows if evaluated_step(row) <= last_step]
    return [row | {"step": min(row["step"], last_step)} for row in kept]


def evaluated_step(row: Metrics) -> int:
    """Return the step that a row has metrics of."""
    return int(row.get(VAL_STEP, row["step"]))


def _json_line(row: Metrics) -> str:
    """Return a row as a line of JSON, which has no NaN."""
    return json.dumps({name: value if math.isfinite(value) else None for name, value in row.items()}) + "\n"
