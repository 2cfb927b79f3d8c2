"""The state of a run that its displays show: its steps, its phases, the last advisory, and the time left."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from raylight.advisories import Advisory
from raylight.trainer.output.loggers.protocol import VAL_STEP, Metrics

KEPT_STEPS = 15
"""Number of steps whose metrics are kept."""
MEASURED_STEPS = 20
"""Number of steps whose median duration is expected of the others."""


def format_seconds(seconds: float) -> str:
    """Return a duration as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))


class TimeEstimate:
    """Estimates the time left from the steps so far.

    Evaluations are estimated separately, because not all steps have one.

    Args:
        total: planned number of steps; 0 if there is none.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._last: Metrics | None = None
        self._steps: deque[float] = deque(maxlen=MEASURED_STEPS)
        self._evaluations: deque[float] = deque(maxlen=MEASURED_STEPS)
        self._measured = self._evaluated = 0
        """Numbers of measured steps, and of those with an evaluation."""

    def add(self, step: int, metrics: Metrics) -> None:
        """Add a step with its `time/total_s`, and with its `time/val_s` if it has an evaluation."""
        if VAL_STEP in metrics or "time/total_s" not in metrics:  # during training
            return
        seconds = metrics.get("time/val_s")
        if self._last is not None and self._last["step"] == step - 1:
            self._measured += 1
            took = metrics["time/total_s"] - self._last["time/total_s"]
            self._steps.append(max(took - (seconds or 0.0), 0.0))
            if seconds is not None:
                self._evaluated += 1
                self._evaluations.append(seconds)
        self._last = {"step": float(step), "time/total_s": metrics["time/total_s"]}

    def left(self, since_last_step: float) -> float | None:
        """Return the seconds left; None before a step was measured, or without a planned number of steps.

        Args:
            since_last_step: seconds since the last step was added.
        """
        if not self._total or not self._steps or self._last is None:
            return None
        steps = self._total - self._last["step"]
        usual = statistics.median(self._steps)
        evaluation = statistics.median(self._evaluations) if self._evaluations else 0.0
        per_step = usual + evaluation * self._evaluated / self._measured
        return max(steps * per_step - min(since_last_step, per_step), 0.0)


@dataclass
class StepPhase:
    """A part of a step that is in progress."""

    name: str
    done: int
    total: int
    started: float


class RunProgress:
    """State of a run, as its displays show it.

    Args:
        total: planned number of steps; 0 if the run has none, or if only its user ends it.
        folder: the run directory, if the run has one.
        clock: returns seconds.
    """

    def __init__(
        self, total: int = 0, folder: str | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.total, self.folder = total, folder
        self.stage = ""
        """Part of the run that is in progress; empty during the steps."""
        self.step = 0
        """Last logged step."""
        self.rows: deque[tuple[int, Metrics]] = deque(maxlen=KEPT_STEPS)
        self.rewards: list[float] = []
        """Training reward of each step."""
        self.advisory: Advisory | None = None
        """The last advisory."""
        self._phases: dict[str, StepPhase] = {}
        self._estimate = TimeEstimate(total)
        self._clock = clock
        self._started = self._last_step = clock()

    def enter_phase(self, name: str, done: int, total: int) -> None:
        """Set how much of a phase is done; a phase that is done is left."""
        if done >= total:
            self._phases.pop(name, None)
        elif name in self._phases:
            self._phases[name].done, self._phases[name].total = done, total
        else:
            self._phases = self._phases | {name: StepPhase(name, done, total, self._clock())}

    def add(self, step: int, metrics: Metrics) -> None:
        """Add the metrics of a step, or of an evaluation during training."""
        self._estimate.add(step, metrics)
        self.rows.append((step, metrics))
        if "train/reward" in metrics:
            self.rewards.append(metrics["train/reward"])
        self.step, self.stage, self._last_step = step, "", self._clock()

    @property
    def phases(self) -> list[tuple[StepPhase, float]]:
        """The phases in progress, each with its seconds so far."""
        return [(phase, self._clock() - phase.started) for phase in list(self._phases.values())]

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._started

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds left; None until there are enough steps."""
        return self._estimate.left(self._clock() - self._last_step)
