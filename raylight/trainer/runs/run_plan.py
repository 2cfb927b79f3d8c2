"""A call of `Trainer.fit`: checks before anything starts, and the settings of its run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from raylight._utils.broken_packages import check_packages
from raylight.agent.resources import LLM
from raylight.algorithms.base import Algorithm
from raylight.algorithms.baseline import Baseline
from raylight.algorithms.policy import PolicyAlgorithm, RunSettings
from raylight.algorithms.supervised import SupervisedAlgorithm
from raylight.config import EngineConfig
from raylight.engines.registry import choose_engine
from raylight.errors import ConfigError
from raylight.tasks.datasets import as_dataset
from raylight.trainer.cluster_fit.policy_checks import (
    check_lengths,
    resolve_state_url,
    trainable_engine,
    trained_agents_pattern,
)
from raylight.trainer.cluster_fit.reward_model_settings import plan_reward_models
from raylight.trainer.cluster_fit.teacher_settings import check_stays, plan_teacher, with_teacher_path
from raylight.trainer.loops.stop_request import StopRequest
from raylight.trainer.loops.supervised_data import batch_schedule, load_supervised_data
from raylight.trainer.spec.arguments import TrainerAlgorithm
from raylight.trainer.spec.inputs import Inputs, as_tasks, as_train_set, check_validation_size, resolve_model
from raylight.trainer.spec.resume import (
    Resume,
    ResumePoint,
    check_no_other_run,
    find_resume_point,
    fresh_start,
    highest_logged_step,
    highest_logged_version,
)
from raylight.trainer.spec.run_resources import must_have_endpoints, with_policy
from raylight.trainer.spec.settings import (
    MODEL_NAME,
    ResolvedSettings,
    ServingSettings,
    SupervisedTraining,
    TrainingSettings,
)

SERVING_ARGUMENTS = frozenset({"engine", "port", "seed"})
"""Arguments of a Trainer that an algorithm with its own loop and a served model reads."""


@dataclass
class Fit:
    """The run that a call of `Trainer.fit` asks for."""

    algorithm: TrainerAlgorithm
    inputs: Inputs | None
    """The agent and its tasks; None for a run without rollouts."""
    settings: ResolvedSettings
    requested: RunSettings
    """Settings of the Trainer, as the algorithm adjusts them."""
    train: Any
    """Training tasks, a TaskSet; those of an algorithm with its own loop may be any dataset, or None.
    SupervisedData of a run without rollouts."""
    val: Any
    total_steps: int
    """Planned number of steps; 0 if only the algorithm knows it, or the user ends the run."""
    resume: Resume = False
    resume_file: Path | None = None
    """Result file from which an algorithm with its own loop continues."""
    start: ResumePoint = field(default_factory=fresh_start)
    """Position at which training starts; see `find_start`."""
    stop: StopRequest = field(default_factory=StopRequest)
    """Ends a training early."""

    @property
    def folder(self) -> Path:
        """The run directory."""
        return Path(self.settings.folder)

    @property
    def remedy(self) -> str:
        """Advice on how to continue after the cluster was lost."""
        if self.settings.learning is None:
            return f"Start the run again; its records are in {self.folder}"
        if self.settings.sessions is not None:
            return f"Go on with `raylight serve --learn --resume --output-dir {self.folder}`"
        return (
            f"Continue after the last training state with output_dir={str(self.folder)!r} and "
            "fit(resume='auto'), or `raylight train FILE --resume`"
        )

    @property
    def last_logged_step(self) -> int | None:
        """Last step whose metrics are kept; None if the run directory starts empty."""
        if self.settings.learning is not None:
            return self.start.last_logged_step
        # the algorithm itself continues after its last step, so all rows are kept
        return None if self.resume_file is None else sys.maxsize

    @property
    def reports_training(self) -> bool:
        """True if the summary is that of a run that trains a model."""
        return self.settings.learning is not None or getattr(self.algorithm, "serves_model", False)

    @property
    def state_config(self) -> dict[str, Any]:
        """The configuration that is stored with a training state."""
        return self.settings.resolved() | {"tasks": self.train.fingerprint()}

    def find_start(self) -> None:
        """Find the training state that a run that trains starts from; its settings are final.

        Raises:
            ConfigError: there is none, or it does not fit.
        """
        if (training := self.settings.learning) is None:
            return
        metrics = self.folder / "metrics.jsonl"
        highest = highest_logged_version(metrics)
        start = find_resume_point(self.resume, training.state_url, self.state_config, highest)
        self.start = replace(start, completed_step=highest_logged_step(metrics))
        if training.checkpoint.path:
            check_no_other_run(self.start, training.state_url)


def plan_policy(
    settings: ResolvedSettings,
    algorithm: PolicyAlgorithm,
    inputs: Inputs,
    requested: RunSettings,
    adapter: Any = None,
    resume: Resume = False,
) -> Fit:
    """Return the run that trains a policy with the Trainer's loop.

    Args:
        settings: those that every run has.
        requested: settings of the Trainer, as the algorithm adjusts them.
        adapter: the Trainer's.

    Raises:
        ConfigError, DatasetError, ModelNotFoundError, BrokenPackageError: the run could not work.
    """
    engine, learner, checkpoint = requested.engine, requested.learner, requested.checkpoint
    tasks = as_train_set(inputs.train)
    val_tasks = as_tasks(inputs.val, "val_dataset", required=False)
    if algorithm.patience is not None and not val_tasks:
        raise ConfigError("nothing reads patience: there are no validation tasks; give a val_dataset")
    check_validation_size(len(val_tasks), algorithm.val_samples, "val_samples")
    modes = ("train", "val") if val_tasks else ("train",)
    inputs.agent.check(with_policy(settings.resources, LLM(model=MODEL_NAME)), modes)
    check_lengths(engine, learner)
    check_packages()
    serving = ServingSettings(
        resolve_model(algorithm.model),
        trainable_engine(engine, learner),
        sampling_parameters=algorithm.sampling_parameters,
        training_temperature=algorithm.training_temperature,
    )
    if tasks.size is None and algorithm.n_steps is None:
        raise ConfigError(
            f"the length of {type(tasks).__name__}, the train_dataset, is not known, and so is not that of "
            "training; set n_steps"
        )
    teacher = plan_teacher(algorithm, serving.model_path)
    if teacher is not None:
        check_stays(teacher.model_path, settings.folder)
        algorithm = with_teacher_path(algorithm, teacher.model_path)
    total_steps = algorithm.steps(tasks.size or 0)
    training = TrainingSettings(
        algorithm,
        learner,
        checkpoint,
        resolve_state_url(checkpoint.path or str(Path(settings.folder, "state"))),
        total_steps,
        trained_agents_pattern(inputs.agent, adapter, algorithm),
        teacher,
    )
    reward_models = plan_reward_models(settings.group_reward)
    settings = replace(
        settings,
        rollout=algorithm.rollout,
        serving=serving,
        training=training,
        reward_models=reward_models,
    )
    _check_has_run(resume, requested)
    return Fit(algorithm, inputs, settings, requested, tasks, val_tasks, total_steps, resume)


def plan_supervised(
    settings: ResolvedSettings, algorithm: SupervisedAlgorithm, requested: RunSettings, resume: Resume = False
) -> Fit:
    """Return the run that trains a model on given examples.

    Args:
        settings: those that every run has.
        requested: settings of the Trainer.

    Raises:
        ConfigError, DatasetError, ModelNotFoundError, RowTooLongError: the run could not work.
    """
    learner, checkpoint = requested.learner, requested.checkpoint
    if learner.kind != "ranks":
        raise ConfigError(
            f"learner.kind={learner.kind!r} needs an engine, and {type(algorithm).__name__} has none; leave "
            "kind out"
        )
    _check_has_run(resume, requested)
    check_packages()
    model_path = resolve_model(algorithm.model)
    data = load_supervised_data(algorithm, model_path, learner)
    schedule = batch_schedule(algorithm, data, settings.seed)
    url = resolve_state_url(checkpoint.path or str(Path(settings.folder, "state")))
    training = SupervisedTraining(algorithm, learner, checkpoint, url, schedule.steps, model_path)
    settings = replace(settings, supervised=training)
    return Fit(algorithm, None, settings, requested, data, None, schedule.steps, resume)


def plan_algorithm(
    settings: ResolvedSettings,
    algorithm: Algorithm,
    inputs: Inputs,
    requested: RunSettings,
    policy_arguments: Sequence[str] = (),
    resume: Resume = False,
) -> Fit:
    """Return the run of an algorithm with its own loop, which enqueues rollouts in the store itself.

    Args:
        settings: those that every run has.
        requested: settings of the Trainer.
        policy_arguments: names of the Trainer's arguments that only an algorithm that trains a policy reads.

    Raises:
        ConfigError, DatasetError, ModelNotFoundError: the run could not work.
    """
    name, model = type(algorithm).__name__, algorithm.served_model
    if unused := [each for each in policy_arguments if model is None or each not in SERVING_ARGUMENTS]:
        trains = "serves no model" if model is None else "does not train the model that it serves"
        raise ConfigError(f"nothing reads {', '.join(unused)}: {name} {trains}; leave these arguments out")
    resources = settings.resources
    if model is not None:
        settings = replace(settings, serving=fixed_model(model, requested.engine))
        resources = with_policy(resources, LLM(model=MODEL_NAME))
    elif not algorithm.serves_model:
        must_have_endpoints(resources.items(), algorithm)
    train, val = as_dataset(inputs.train, "train_dataset"), as_dataset(inputs.val, "val_dataset")
    total_steps = algorithm.total_steps(len(train) if train is not None else 0)
    inputs.agent.check(resources, more_may_come=not isinstance(algorithm, Baseline))
    file = _resume_file(algorithm, resume, requested, Path(settings.folder))
    return Fit(algorithm, inputs, settings, requested, train, val, total_steps, resume, file)


def fixed_model(model: str, engine: EngineConfig) -> ServingSettings:
    """Return the settings of a model that is served unchanged.

    Args:
        model: folder, name in the local cache, or the upstream's name.

    Raises:
        ModelNotFoundError: there is no such model.
        ConfigError: the engine is not installed.
        BrokenPackageError: see `check_packages`.
    """
    kind = choose_engine(engine)
    if kind == "upstream":
        update = {"kind": kind, "upstream_model": engine.upstream_model or model}
        return ServingSettings("", engine.model_copy(update=update))
    check_packages()
    return ServingSettings(resolve_model(model), engine.model_copy(update={"kind": kind}))


def _check_has_run(resume: Resume, requested: RunSettings) -> None:
    if resume in (True, "auto") and requested.output_dir is None:
        raise ConfigError("resume has no run to continue: give its output_dir (--output-dir)")


def _resume_file(algorithm: Algorithm, resume: Resume, requested: RunSettings, folder: Path) -> Path | None:
    """Return the result file from which an algorithm with its own loop continues; None starts fresh."""
    if resume is False:
        return None
    if algorithm.result_file is None:
        raise ConfigError(
            f"nothing reads resume: {type(algorithm).__name__} writes no training states; leave resume out"
        )
    _check_has_run(resume, requested)
    path = folder if resume in (True, "auto") else Path(str(resume)).expanduser()
    file = path if path.is_file() else path / algorithm.result_file
    if file.exists():
        return file.absolute()
    if resume != "auto":
        raise ConfigError(
            f"there is no {file} to resume from; pass resume='auto' to start fresh where there is none"
        )
    return None
