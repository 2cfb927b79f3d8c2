"""Runs of an algorithm with its own loop, which enqueues rollouts in the store itself."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, cast

from raylight._utils.agent_threads import AgentThreads
from raylight.agent.resources import LLM
from raylight.algorithms.base import Algorithm
from raylight.algorithms.baseline import Baseline
from raylight.algorithms.policy import RunSettings
from raylight.config import MODEL_NAME
from raylight.errors import ConfigError
from raylight.tasks.datasets import as_dataset
from raylight.trainer.cluster_fit.cluster_settings import fit_served
from raylight.trainer.cluster_fit.hardware import ClusterFacts
from raylight.trainer.components.run_components import RolloutComponents
from raylight.trainer.output.report import Report
from raylight.trainer.runs.run_spec import RunSpec, check_has_run, run_config
from raylight.trainer.spec.arguments import GivenSettings
from raylight.trainer.spec.inputs import Inputs, fixed_model, resolve_model
from raylight.trainer.spec.resume import Resume
from raylight.trainer.spec.run_file import describe_algorithm
from raylight.trainer.spec.run_resources import must_have_endpoints, with_policy
from raylight.trainer.spec.settings import RolloutSettings, ServedSettings
from raylight.types import JsonObject

SERVING_ARGUMENTS = frozenset({"engine", "port", "seed"})
"""Arguments of a Trainer that an algorithm with its own loop and a served model reads."""


@dataclass(kw_only=True)
class CustomRun(RunSpec[RolloutSettings, RolloutComponents, Report]):
    """A run of an algorithm with its own loop.

    Attributes:
        train, val: the tasks, as lists; None if there are none.
        resume_file: result file from which the algorithm continues; None starts fresh.
    """

    algorithm: Algorithm
    inputs: Inputs
    train: object
    val: object
    resume_file: Path | None

    @classmethod
    def plan(
        cls,
        settings: RolloutSettings,
        algorithm: Algorithm,
        inputs: Inputs,
        requested: RunSettings,
        policy_arguments: Sequence[str] = (),
        resume: Resume = False,
    ) -> Self:
        """Return the run that a call of `Trainer.fit` asks for.

        Args:
            settings: those that the Trainer gives every run.
            requested: settings of the Trainer.
            policy_arguments: names of the Trainer's arguments that only an algorithm that trains a policy
                reads.

        Raises:
            ConfigError, DatasetError, ModelNotFoundError: the run could not work.
        """
        name, model = type(algorithm).__name__, algorithm.served_model
        if unused := [each for each in policy_arguments if model is None or each not in SERVING_ARGUMENTS]:
            trains = "serves no model" if model is None else "does not train the model that it serves"
            raise ConfigError(
                f"nothing reads {', '.join(unused)}: {name} {trains}; leave these arguments out"
            )
        resources = settings.resources
        if model is not None:
            settings = ServedSettings.extending(settings, serving=fixed_model(model, requested.engine))
            resources = with_policy(resources, LLM(model=MODEL_NAME))
        elif not algorithm.serves_model:
            must_have_endpoints(resources.items(), algorithm)
        train, val = as_dataset(inputs.train, "train_dataset"), as_dataset(inputs.val, "val_dataset")
        total_steps = algorithm.total_steps(len(train) if train is not None else 0)
        inputs.agent.check(resources, more_may_come=not isinstance(algorithm, Baseline))
        return cls(
            settings=settings,
            requested=requested,
            total_steps=total_steps,
            algorithm=algorithm,
            inputs=inputs,
            train=train,
            val=val,
            resume_file=_resume_file(algorithm, resume, requested, Path(settings.folder)),
        )

    @property
    def trains(self) -> bool:
        """True if the algorithm trains a model that it serves itself."""
        return self.algorithm.serves_model

    @property
    def last_logged_step(self) -> int | None:
        # the algorithm itself continues after its last step, so all rows are kept
        return None if self.resume_file is None else sys.maxsize

    def for_cluster(self, facts: ClusterFacts) -> tuple[str, ...]:
        if not isinstance(self.settings, ServedSettings):
            return ()
        self.settings, notes = fit_served(self.settings, self.requested.engine, facts)
        return notes

    def config(self, given: GivenSettings) -> JsonObject:
        return run_config(self.settings, given, describe_algorithm(self.algorithm), self.inputs)

    def loop(self, components: RolloutComponents, report: Report) -> AlgorithmLoop:
        return AlgorithmLoop(self, components, report)

    def summary(self, loop: AlgorithmLoop, report: Report, counts: dict[str, int]) -> JsonObject:
        return report.finish(counts) if self.trains else report.finish_plain(counts)


class TrainerRunContext:
    """Implements `raylight.algorithms.base.RunContext` by the run's report.

    Args:
        resume_file: `Algorithm.result_file` of the run to resume; None for a new run.
    """

    def __init__(self, report: Report, resume_file: Path | None = None) -> None:
        self.folder, self.checkpoint, self.resume_file = report.folder, report.checkpoint, resume_file
        self.stage, self.note, self.step = report.stage, report.note, report.step
        self.report_failures, self.model_path = report.failures, resolve_model


class AlgorithmLoop:
    """The `run` of an algorithm, which gets the parts of the run that it may use."""

    def __init__(self, run: CustomRun, components: RolloutComponents, report: Report) -> None:
        self._algorithm = run.algorithm
        self._datasets = {"train_dataset": run.train, "val_dataset": run.val}
        run.algorithm.set_store(components.store)
        run.algorithm.set_initial_resources(components.endpoints.resources)
        run.algorithm.set_run_context(TrainerRunContext(report, run.resume_file))

    async def run(self) -> None:
        algorithm = self._algorithm
        if algorithm.is_async():
            await cast("Awaitable[None]", algorithm.run(**self._datasets))
            return
        # in a daemon thread, for which Ctrl-C does not wait
        result, error = await AgentThreads().run(functools.partial(algorithm.run, **self._datasets))
        if error is not None:
            raise error
        if inspect.isawaitable(result):  # a plain function that returns a coroutine
            await result


def _resume_file(algorithm: Algorithm, resume: Resume, requested: RunSettings, folder: Path) -> Path | None:
    """Return the result file from which an algorithm with its own loop continues; None starts fresh."""
    if resume is False:
        return None
    if algorithm.result_file is None:
        raise ConfigError(
            f"nothing reads resume: {type(algorithm).__name__} writes no training states; leave resume out"
        )
    check_has_run(resume, requested)
    path = folder if resume in (True, "auto") else Path(str(resume)).expanduser()
    file = path if path.is_file() else path / algorithm.result_file
    if file.exists():
        return file.absolute()
    if resume != "auto":
        raise ConfigError(
            f"there is no {file} to resume from; pass resume='auto' to start fresh where there is none"
        )
    return None
