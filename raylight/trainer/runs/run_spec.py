"""A run as one object: its settings, and how it goes on from there to its summary.

A kind of run is a subclass. `plan` checks what the user gave. `for_cluster` makes the settings final.
`components` composes what they ask for, `loop` works with it, and `summary` is the result.
"""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Protocol, TypeVar, cast

from raylight._utils.machine import check_writable
from raylight.algorithms.policy import RunSettings
from raylight.errors import ConfigError
from raylight.experience.batches.supervised_batches import SupervisedData
from raylight.tasks.task_set import TaskSet
from raylight.trainer.cluster_fit.hardware import ClusterFacts
from raylight.trainer.components.run_components import RolloutComponents, RunComponents
from raylight.trainer.output.report import ProgressReporter, Report
from raylight.trainer.ray_session.cluster_monitor import is_cluster_lost
from raylight.trainer.spec.arguments import GivenSettings
from raylight.trainer.spec.inputs import Inputs
from raylight.trainer.spec.resume import (
    Resume,
    ResumePoint,
    check_no_other_run,
    find_resume_point,
    fresh_start,
    highest_logged_version,
    logged_evaluations,
    prepare_states,
)
from raylight.trainer.spec.run_file import describe_component, describe_data, describe_resources
from raylight.trainer.spec.settings import CommonSettings, SupervisedRunSettings, TrainedSettings
from raylight.types import JsonObject

SECTIONS = ("engine", "learner", "runner", "checkpoint", "store")
"""Settings of a run that a run file has under the same names."""


class Loop(Protocol):
    """The work of a run."""

    async def run(self) -> None:
        """Work until the run is over."""
        ...


Settings = TypeVar("Settings", bound=CommonSettings)
Trained = TypeVar("Trained", TrainedSettings, SupervisedRunSettings)
Components = TypeVar("Components", bound=RunComponents)
Reporter = TypeVar("Reporter", bound=ProgressReporter)


@dataclass(kw_only=True)
class RunSpec(ABC, Generic[Settings, Components, Reporter]):
    """A planned run.

    Attributes:
        settings: final after `for_cluster`.
        requested: settings of the Trainer, as the algorithm adjusts them.
        total_steps: planned number of steps; 0 if only the algorithm determines it, or the user ends the run.
    """

    composed: ClassVar[type[RunComponents]] = RolloutComponents
    """Class of the components that the settings ask for."""
    settings: Settings
    requested: RunSettings
    total_steps: int = 0

    start: ResumePoint = field(default_factory=fresh_start)
    """Position at which the run starts; see `find_start`."""

    @property
    def trains(self) -> bool:
        """True if the summary describes a training."""
        return False

    @property
    def folder(self) -> Path:
        """The run directory."""
        return Path(self.settings.folder)

    @property
    def remedy(self) -> str:
        """Advice on how to continue after the cluster was lost."""
        return f"Start the run again; its records are in {self.folder}"

    @property
    def last_logged_step(self) -> int | None:
        """Last step whose metrics are kept; None if the run directory starts empty."""
        return None

    def check_folders(self) -> None:
        """Raise a ConfigError if a folder of the run cannot be written."""
        for setting, folder in self.settings.folders.items():
            check_writable(folder, setting)

    @abstractmethod
    def for_cluster(self, facts: ClusterFacts) -> tuple[str, ...]:
        """Make the settings final; return messages for the user.

        Raises:
            ConfigError: the run cannot work on this cluster.
        """

    def find_start(self) -> None:
        """Find the training state to start from, once the settings are final."""

    def prepare_states(self) -> None:
        """Remove training states that the run will write again."""

    def config(self, given: GivenSettings) -> JsonObject:
        """Return the content of config.yaml: a run file that starts the run again (see `RunFile`)."""
        raise NotImplementedError

    def components(self, show_stage: Callable[[str], None], owns_cluster: bool) -> Components:
        """Return the components of the run, which start when they are entered."""
        return cast("Components", self.composed(self.settings, show_stage, owns_cluster, self.start))

    @abstractmethod
    def loop(self, components: Components, report: Reporter) -> Loop:
        """Return the work of the run."""

    @abstractmethod
    def summary(self, loop: Any, report: Reporter, counts: dict[str, int]) -> JsonObject:
        """Write and return the summary.

        Args:
            loop: the finished work.
            counts: counters of the components.
        """

    async def work(self, report: Reporter, owns_cluster: bool) -> JsonObject:
        """Start the components, work, and stop them; return the summary.

        Args:
            owns_cluster: True if the Ray cluster ends with this run.
        """
        async with self.components(report.stage, owns_cluster) as components:
            loop = self.loop(components, report)
            with _noted_interrupt(report):
                async with components.watched():
                    await loop.run()
            summary = self.summary(loop, report, await components.counts())
            report.stage("stopping")
        return summary


@dataclass(kw_only=True)
class TrainingRun(RunSpec[Trained, Components, Report]):
    """A run that trains a model, and can be resumed from its training states.

    Attributes:
        tasks: what it learns from.
    """

    tasks: SupervisedData | TaskSet
    resume: Resume = False

    @property
    def trains(self) -> bool:
        return True

    @property
    def state_config(self) -> JsonObject:
        """The configuration that is stored with a training state."""
        return self.settings.resolved() | {"tasks": self.tasks.fingerprint()}

    @property
    def remedy(self) -> str:
        return (
            f"Continue after the last training state with output_dir={str(self.folder)!r} and "
            "fit(resume='auto'), or `raylight train FILE --resume`"
        )

    @property
    def last_logged_step(self) -> int | None:
        return self.start.last_logged_step

    def find_start(self) -> None:
        """Find the training state to start from, once the settings are final.

        Raises:
            ConfigError: there is none, or it does not fit.
        """
        training, metrics = self.settings.training, self.folder / "metrics.jsonl"
        highest = highest_logged_version(metrics)
        start = find_resume_point(self.resume, training.state_url, self.state_config, highest)
        self.start = replace(start, evaluated_steps=logged_evaluations(metrics))
        if training.checkpoint.path:
            check_no_other_run(self.start, training.state_url)

    def prepare_states(self) -> None:
        prepare_states(self.start, self.settings.training.state_url, self.state_config)


def run_config(
    settings: CommonSettings, given: GivenSettings, algorithm: JsonObject, inputs: Inputs | None
) -> JsonObject:
    """Return the content of config.yaml of a run.

    Args:
        algorithm: its description.
        inputs: None if agents outside the run bring the tasks, or the algorithm has its own examples.
    """
    facts = settings.resolved()
    content: JsonObject = {}
    if inputs is not None:
        content["agent"] = describe_component(inputs.agent_spec)
        content["data"] = {"train": describe_data(inputs.train), "val": describe_data(inputs.val)}
    content |= {
        "algorithm": algorithm,
        "output_dir": settings.folder,
        "seed": facts.pop("seed", None),
        "resources": describe_resources(given.resources) or None,
        **{name: facts.pop(name, None) for name in SECTIONS},
        **{name: describe_component(spec) for name, spec in given.components.items()},
        **given.process,
        "run": {name: value for name, value in facts.items() if name not in ("algorithm", "model")},
    }
    return {name: value for name, value in content.items() if value is not None}


def check_has_run(resume: Resume, requested: RunSettings) -> None:
    """Raise a ConfigError if the run directory to continue in does not exist."""
    if resume in (True, "auto") and requested.output_dir is None:
        raise ConfigError("resume has no run to continue: give its output_dir (--output-dir)")


@contextlib.contextmanager
def _noted_interrupt(report: ProgressReporter) -> Iterator[None]:
    """Show a note if the block is cancelled."""
    try:
        yield
    except asyncio.CancelledError:
        lost = is_cluster_lost()
        report.note("the Ray cluster is lost" if lost else "interrupted; stopping the components of this run")
        raise
