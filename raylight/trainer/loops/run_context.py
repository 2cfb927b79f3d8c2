"""The interface of a run to an algorithm with its own loop."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from raylight.trainer.output.report import Metrics, Report
from raylight.trainer.spec.inputs import resolve_model
from raylight.types import FinishedRollout


@dataclass(frozen=True)
class TrainerRunContext:
    """Implements `raylight.algorithms.base.RunContext`.

    Attributes:
        resume_file: `Algorithm.result_file` of the run to resume; None for a new run.
    """

    report: Report
    resume_file: Path | None = None

    @property
    def folder(self) -> Path:
        return self.report.folder

    @property
    def checkpoint(self) -> Path:
        return self.report.checkpoint

    def model_path(self, model: str) -> str:
        return resolve_model(model)

    def report_failures(self, finished: list[FinishedRollout]) -> None:
        self.report.failures(finished)

    def stage(self, text: str) -> None:
        self.report.stage(text)

    def note(self, text: str) -> None:
        self.report.note(text)

    def step(self, step: int, metrics: Metrics) -> None:
        self.report.step(step, metrics)
