"""Loggers that write to the display and to the run directory, and the rows that a run resumes with."""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Sequence
from pathlib import Path

from raylight._utils.files import write_atomic
from raylight.trainer.output.loggers.protocol import VAL_STEP, Display, Metrics, evaluated_step
from raylight.types import JsonObject

METRICS_FILE = "metrics.jsonl"
PLOT_FILE = "reward.png"
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


class ConsoleLogger:
    """Shows each step on the run's display."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def start(self, config: JsonObject) -> None:
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

    def start(self, config: JsonObject) -> None:
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
    """Draws `reward.png` at the end of a run with rewards: these and seconds over steps."""

    def __init__(self, folder: Path, history: Sequence[Metrics] = ()) -> None:
        self._folder = folder
        self._rows = [_plotted(row) for row in history]

    def start(self, config: JsonObject) -> None:
        pass

    def log(self, step: int, metrics: Metrics) -> None:
        self._rows.append(_plotted({"step": step, **metrics}))

    def finish(self) -> None:
        if not any(name in row for row in self._rows for name in ("train/reward", "val/reward")):
            return
        from raylight.trainer.output.plot import plot_rewards

        best = self._folder / "best" / "best.json"
        plot_rewards(
            self._rows, self._folder / PLOT_FILE, json.loads(best.read_text()) if best.exists() else None
        )


def read_history(folder: Path, last_step: int | None) -> list[Metrics]:
    """Return the rows of `metrics.jsonl` up to a step; none without `last_step` or without the file.

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


def _plotted(row: Metrics) -> Metrics:
    return {name: row[name] for name in PLOTTED if name in row}


def _json_line(row: Metrics) -> str:
    """Return a row as a line of JSON, which has no NaN."""
    return json.dumps({name: value if math.isfinite(value) else None for name, value in row.items()}) + "\n"
