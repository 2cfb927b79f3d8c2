"""Base of the loggers that write to an experiment tracker, and the thread that calls one."""

from __future__ import annotations

import math
import queue
import threading
import time
from pathlib import Path
from typing import Any

from raylight._utils.files import write_atomic
from raylight.trainer.output.loggers.protocol import VAL_STEP, Metrics, SampledRollout, evaluated_step
from raylight.types import JsonObject

TRACKER_FOLDER = "trackers"
"""Folder of the run directory with the ids of the run in its trackers."""
MAX_WAITING = 1_000
"""Rows that wait for a tracker; further ones are lost to it."""
FINISH_TIMEOUT_S = 60.0
"""Time in which the trackers must take the rows that wait at the end of a run."""
TOTAL_SECONDS = "time/total_s"


class Tracker:
    """Base of the loggers of experiment trackers.

    A tracker has the methods of a `MetricLogger`. All of them are called in one separate thread.

    Args:
        folder: the run directory.
        project: group of runs in the tracker.
        name: name of the run in the tracker; None: the run directory's.
        settings: further arguments for the tracker, as its class describes.
    """

    def __init__(
        self, folder: Path, project: str = "raylight", name: str | None = None, **settings: Any
    ) -> None:
        self.folder, self.project, self.name = folder, project, name or folder.name
        self.settings = settings
        self.failure: str | None = None
        """Reason why the run ended with an error."""

    def start(self, config: JsonObject) -> None:
        """Begin a run in the tracker, or continue the one in `saved_id`."""
        raise NotImplementedError

    def log(self, step: int, metrics: Metrics) -> None:
        """Send the metrics of a step; see `points`."""
        raise NotImplementedError

    def rollouts(self, step: int, table: list[SampledRollout]) -> None:
        """Send a few rollouts of an evaluation, if the tracker has a table for them."""

    def fail(self, reason: str) -> None:
        """Keep the reason for `finish`, which ends the tracker's run as a failed one."""
        self.failure = reason

    def finish(self) -> None:
        """End the tracker's run."""
        raise NotImplementedError

    @property
    def saved_id(self) -> str | None:
        """Id of this run in the tracker, from `save_id` of the process that a resumed run continues."""
        file = self._id_file
        return file.read_text().strip() or None if file.exists() else None

    def save_id(self, run_id: str) -> None:
        """Keep the id of the run in the tracker in the run directory."""
        self._id_file.parent.mkdir(exist_ok=True)
        write_atomic(self._id_file, f"{run_id}\n")

    @property
    def _id_file(self) -> Path:
        return self.folder / TRACKER_FOLDER / f"{type(self).__name__}.id"


def points(step: int, metrics: Metrics) -> tuple[int, Metrics]:
    """Return the step that metrics are drawn at, and those that have a value there.

    An evaluation during training is drawn at the step that it evaluated. NaN and infinity are left out,
    because they are not points, and some trackers reject the whole row.
    """
    hidden = (VAL_STEP, TOTAL_SECONDS) if VAL_STEP in metrics else ()
    finite = {n: float(v) for n, v in metrics.items() if n not in hidden and math.isfinite(v)}
    return evaluated_step({"step": step, **metrics}), finite


class TrackerError(Exception):
    """A failure of a tracker in its thread.

    Attributes:
        method: name of the method that raised.
    """

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {error}")
        self.method = method
        self.__cause__ = error


class TrackerThread:
    """Calls a tracker in a separate thread. A call returns at once; its failure is raised by a later call.

    After a failed `start` the tracker receives nothing.
    """

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._calls: queue.SimpleQueue[tuple[str, tuple[object, ...]] | None] = queue.SimpleQueue()
        self._failures: queue.SimpleQueue[TrackerError] = queue.SimpleQueue()
        self._rows = self._recorded = 0
        self._started = False
        self._deadline: float | None = None
        self._thread = threading.Thread(target=self._work, name=self.name, daemon=True)

    @property
    def name(self) -> str:
        """Name of the tracker in messages."""
        return type(self._tracker).__name__

    @property
    def takes_rollouts(self) -> bool:
        """True if the tracker shows rollouts."""
        return type(self._tracker).rollouts is not Tracker.rollouts

    def start(self, config: JsonObject) -> None:
        self._thread.start()
        self._call("start", config)

    def log(self, step: int, metrics: Metrics) -> None:
        self._rows += 1
        self._call("log", step, dict(metrics))

    def rollouts(self, step: int, table: list[SampledRollout]) -> None:
        self._call("rollouts", step, table)

    def fail(self, reason: str) -> None:
        self._call("fail", reason)

    def close(self, timeout_s: float) -> None:
        """Let the tracker finish, for at most so long."""
        self._deadline = time.monotonic() + timeout_s
        self._calls.put(("finish", ()))
        self._calls.put(None)

    def finish(self) -> None:
        """Wait until the tracker has finished, or for the time of `close`."""
        if self._deadline is None:
            self.close(FINISH_TIMEOUT_S)
        assert self._deadline is not None
        if self._thread.ident is not None:
            self._thread.join(max(self._deadline - time.monotonic(), 0))
        self._raise_failure()

    @property
    def loss(self) -> str | None:
        """Description of the rows that the tracker has not taken; None if it has taken all."""
        hangs = self._thread.is_alive()
        if not hangs and self._recorded == self._rows:
            return None
        return (
            f"metric logger {self.name} recorded {self._recorded} of {self._rows} rows"
            f"{' and has not finished' if hangs else ''}; metrics.jsonl has all of them, if the run has the "
            'logger "jsonl"'
        )

    def _call(self, method: str, *args: object) -> None:
        if self._calls.qsize() < MAX_WAITING:
            self._calls.put((method, args))
        self._raise_failure()

    def _raise_failure(self) -> None:
        if not self._failures.empty():
            raise self._failures.get()

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            method, args = call
            if method != "start" and not self._started:
                continue
            try:
                getattr(self._tracker, method)(*args)
            except (Exception, SystemExit) as error:  # some trackers end the process after an error
                self._failures.put(TrackerError(method, error))
            else:
                self._started = True
                self._recorded += method == "log"
