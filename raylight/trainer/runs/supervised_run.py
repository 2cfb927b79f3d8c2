"""Runs that train a model on given examples, without rollouts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from raylight._utils.broken_packages import check_packages
from raylight.algorithms.policy import RunSettings
from raylight.algorithms.supervised import SupervisedAlgorithm
from raylight.errors import ConfigError
from raylight.experience.batches.supervised_batches import SupervisedData
from raylight.trainer.cluster_fit.cluster_settings import fit_supervised
from raylight.trainer.cluster_fit.hardware import ClusterFacts
from raylight.trainer.cluster_fit.policy_checks import resolve_state_url
from raylight.trainer.components.run_components import SupervisedComponents
from raylight.trainer.loops.supervised_data import batch_schedule, load_supervised_data
from raylight.trainer.loops.supervised_loop import SupervisedLoop
from raylight.trainer.output.report import Report
from raylight.trainer.runs.run_spec import TrainingRun, check_has_run, run_config
from raylight.trainer.spec.arguments import GivenSettings
from raylight.trainer.spec.inputs import resolve_model
from raylight.trainer.spec.resume import Resume
from raylight.trainer.spec.run_file import describe_algorithm
from raylight.trainer.spec.settings import SupervisedRunSettings, SupervisedTraining
from raylight.types import JsonObject


@dataclass(kw_only=True)
class SupervisedRun(TrainingRun[SupervisedRunSettings, SupervisedComponents]):
    """A run that trains a model on given examples."""

    composed = SupervisedComponents
    tasks: SupervisedData

    @classmethod
    def plan(
        cls,
        name: str,
        folder: Path,
        seed: int,
        algorithm: SupervisedAlgorithm,
        requested: RunSettings,
        resume: Resume = False,
    ) -> Self:
        """Return the run that a call of `Trainer.fit` asks for.

        Args:
            name: name of the run.
            folder: the run directory.
            seed: seed of the order of the examples.
            requested: settings of the Trainer.

        Raises:
            ConfigError, DatasetError, ModelNotFoundError, RowTooLongError: the run could not work.
        """
        learner, checkpoint = requested.learner, requested.checkpoint
        if learner.kind != "ranks":
            raise ConfigError(
                f"learner.kind={learner.kind!r} needs an engine, and {type(algorithm).__name__} has none; "
                "leave kind out"
            )
        algorithm.check_adapter(learner.lora is not None)
        check_has_run(resume, requested)
        check_packages()
        model_path = resolve_model(algorithm.model)
        data = load_supervised_data(algorithm, model_path, learner)
        steps = batch_schedule(algorithm, data, seed).steps
        url = resolve_state_url(checkpoint.path or str(folder / "state"))
        training = SupervisedTraining(algorithm, learner, checkpoint, url, steps, model_path)
        return cls(
            settings=SupervisedRunSettings(name=name, folder=str(folder), seed=seed, training=training),
            requested=requested,
            total_steps=steps,
            resume=resume,
            tasks=data,
        )

    def for_cluster(self, facts: ClusterFacts) -> tuple[str, ...]:
        self.settings = fit_supervised(self.settings, facts)
        return ()

    def config(self, given: GivenSettings) -> JsonObject:
        training = self.settings.training
        algorithm = describe_algorithm(training.algorithm) | {"model": training.model_path}
        return run_config(self.settings, given, algorithm, None)

    def loop(self, components: SupervisedComponents, report: Report) -> SupervisedLoop:
        return SupervisedLoop(components, self.tasks, report, self.state_config)

    def summary(self, loop: SupervisedLoop, report: Report, counts: dict[str, int]) -> JsonObject:
        return report.finish_supervised(counts)
