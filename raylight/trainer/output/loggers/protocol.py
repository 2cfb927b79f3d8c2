"""`MetricLogger`, the interface of metric loggers."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from raylight.advisories import Advisory
from raylight.types import JsonObject

Metrics = dict[str, float]

VAL_STEP = "val/step"
"""Metric of an evaluation during training: the step whose weights were evaluated."""


class SampledRollout(NamedTuple):
    """A rollout of an evaluation, as trackers show it in a table."""

    task: str
    answer: str
    reward: float | None
    rewards: str
    """All rewards by name, as JSON."""
    status: str
    tokens: int
    """Number of sampled tokens."""
    mode: str
    rollout_id: str


class MetricLogger(Protocol):
    """A receiver of metrics. It is called in the driver, in the order start, log for each step, finish.

    A logger may have two more methods:

    - `rollouts(step: int, table: list[SampledRollout])` receives a few rollouts of each evaluation, before
      the metrics of its step.
    - `fail(reason: str)` is called before `finish` if the run ended with an error.
    """

    def start(self, config: JsonObject) -> None:
        """Begin a run, or continue one that is resumed.

        Args:
            config: the content of `config.yaml`.
        """
        ...

    def log(self, step: int, metrics: Metrics) -> None:
        """Receive the metrics of a step by name; step 0 is the evaluation before training. Values may be
        NaN.

        Metrics with `val/step` belong to an evaluation during training alone: of the step `val/step`, when
        `step` was the last one.
        """
        ...

    def finish(self) -> None:
        """End the run, even after an error."""
        ...


class Display(Protocol):
    """Output of a run in progress to a person."""

    def stage(self, text: str) -> None:
        """Show what the run is doing now."""
        ...

    def progress(self, phase: str, done: int, total: int) -> None:
        """Show how much of a phase of a step is done, where output can be redrawn. A phase ends when all is
        done."""
        ...

    def step(self, step: int, metrics: Metrics) -> None:
        """Show the metrics of a step."""
        ...

    def note(self, text: str) -> None:
        """Show a message that stays."""
        ...

    def advise(self, advisory: Advisory) -> None:
        """Show a finding in the metrics."""
        ...


def evaluated_step(row: Metrics) -> int:
    """Return the step that a row has metrics of."""
    return int(row.get(VAL_STEP, row["step"]))
