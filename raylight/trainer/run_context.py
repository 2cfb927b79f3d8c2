"""The interface of a run to an algorithm with its own loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from raylight.agent.resources import LLM, NamedResources
from raylight.experience.batch import BatchReport
from raylight.trainer.inputs import resolve_model
from raylight.trainer.outcome import describe, raise_if_hopeless
from raylight.trainer.report import Metrics, Report
from raylight.trainer.run_resources import with_policy
from raylight.types import FinishedRollout


@dataclass(frozen=True)
class TrainerRunContext:
    """Implements `raylight.algorithms.base.RunContext`.

    Attributes:
        secret: the run's secret, from which the API keys of attempts are derived.
        resources: the run's resources, without the model that the algorithm serves.
        trained_agents: regular expression for the agents whose calls are trained on; None for all.
        resume_file: `Algorithm.result_file` of the run to resume; None for a new run.
    """

    report: Report
    secret: str
    resources: NamedResources
    trained_agents: str | None
    resume_file: Path | None = None

    @property
    def folder(self) -> Path:
        return self.report.folder

    @property
    def checkpoint(self) -> Path:
        return self.report.checkpoint

    def model_path(self, model: str) -> str:
        return resolve_model(model)

    def resources_with(self, llm: LLM) -> NamedResources:
        return with_policy(self.resources, llm)

    def report_failures(self, finished: list[FinishedRollout]) -> None:
        self.report.failures(finished)

    def check_scored(self, finished: list[FinishedRollout], failure_reward: float | None) -> None:
        self.report_failures(finished)
        raise_if_hopeless(finished, failure_reward)

    def batch_metrics(
        self,
        finished: list[FinishedRollout],
        content: BatchReport,
        seconds: float,
        failure_reward: float | None = None,
    ) -> Metrics:
        self.report.batch(content)
        return describe(finished, content, seconds, failure_reward)

    def stage(self, text: str) -> None:
        self.report.stage(text)

    def rollout_progress(self, mode: str) -> Callable[[int, int], None]:
        return self.report.rollout_progress(mode)

    def note(self, text: str) -> None:
        self.report.note(text)

    def step(self, step: int, metrics: Metrics) -> None:
        self.report.step(step, metrics)
