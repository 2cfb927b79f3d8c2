"""Runs that train a policy with the Trainer's loop: on the rollouts of an agent, or on sessions of agents
elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from raylight._utils.bounds import ENDLESS
from raylight._utils.broken_packages import check_packages
from raylight.agent.resources import LLM
from raylight.algorithms.policy import PolicyAlgorithm, RunSettings
from raylight.algorithms.verl import VERL
from raylight.config import MODEL_NAME
from raylight.errors import ConfigError
from raylight.rewards.process_reward import ProcessReward
from raylight.serving.gateway.session_service import SessionRules
from raylight.tasks.task_set import ShuffledTasks, TaskSet
from raylight.trainer.cluster_fit.cluster_settings import fit_trained
from raylight.trainer.cluster_fit.hardware import ClusterFacts
from raylight.trainer.cluster_fit.policy_checks import (
    check_lengths,
    check_models,
    resolve_state_url,
    trainable_engine,
    trained_agents_pattern,
)
from raylight.trainer.cluster_fit.scoring_models import check_stays, plan_reward_models, plan_teachers
from raylight.trainer.components.run_components import PolicyComponents
from raylight.trainer.loops.policy_loop import PolicyLoop, StopRequest
from raylight.trainer.loops.session_groups import SessionGroups
from raylight.trainer.output.report import Report
from raylight.trainer.runs.run_spec import TrainingRun, check_has_run, run_config
from raylight.trainer.spec.arguments import GivenSettings
from raylight.trainer.spec.inputs import Inputs, as_tasks, as_train_set, check_validation_size, resolve_model
from raylight.trainer.spec.resume import Resume
from raylight.trainer.spec.run_file import describe_algorithm
from raylight.trainer.spec.run_resources import with_policy
from raylight.trainer.spec.settings import (
    RankTeacher,
    RolloutSettings,
    ServingSettings,
    TrainedSettings,
    TrainingSettings,
)
from raylight.types import JsonObject

SESSION_TASKS = ShuffledTasks([None])
"""Tasks of an `OnlineRun`: an agent outside the run brings its own, so a place in the queue has none."""


@dataclass(kw_only=True)
class ServedTrainingRun(TrainingRun[TrainedSettings, PolicyComponents]):
    """A run that trains its served model, on the rollouts of an agent or on sessions."""

    composed = PolicyComponents
    tasks: TaskSet
    algorithm: PolicyAlgorithm
    """As the user gave it."""
    inputs: Inputs | None = None
    """The agent and its tasks as given; None if they are outside the run."""

    def for_cluster(self, facts: ClusterFacts) -> tuple[str, ...]:
        self.settings, notes = fit_trained(self.settings, self.requested, facts)
        return notes

    def config(self, given: GivenSettings) -> JsonObject:
        settings, is_verl = self.settings, isinstance(self.algorithm, VERL)
        algorithm = describe_algorithm(settings.training.algorithm)
        if not is_verl:
            algorithm |= {"model": settings.serving.model_path}
        content = run_config(settings, given, algorithm, self.inputs)
        if is_verl:
            content["run"]["algorithm"] = settings.training.resolved(settings.serving.model_path)["algorithm"]
            # VERL derives the rest from its configuration again, and rejects other values next to it
            for name in ("engine", "learner", "checkpoint"):
                content[name] = getattr(given.settings, name).model_dump(mode="json", exclude_unset=True)
            if given.settings.seed is None:
                del content["seed"]
            if given.settings.output_dir is None and self.requested.output_dir is not None:
                del content["output_dir"]
        return content

    def summary(self, loop: object, report: Report, counts: dict[str, int]) -> JsonObject:
        return report.finish(counts)


@dataclass(kw_only=True)
class PolicyRun(ServedTrainingRun):
    """A run that trains a policy on the rollouts of an agent."""

    val_tasks: list[object]

    @classmethod
    def plan(
        cls,
        settings: RolloutSettings,
        algorithm: PolicyAlgorithm,
        inputs: Inputs,
        requested: RunSettings,
        adapter: object = None,
        resume: Resume = False,
    ) -> Self:
        """Return the run that a call of `Trainer.fit` asks for.

        Args:
            settings: those that the Trainer gives every run.
            requested: settings of the Trainer, as the algorithm adjusts them.
            adapter: the Trainer's.

        Raises:
            ConfigError, DatasetError, ModelNotFoundError, BrokenPackageError: the run could not work.
        """
        tasks = as_train_set(inputs.train)
        val_tasks = as_tasks(inputs.val, "val_dataset", required=False)
        if algorithm.patience is not None and not val_tasks:
            raise ConfigError("nothing reads patience: there are no validation tasks; give a val_dataset")
        check_validation_size(len(val_tasks), algorithm.val_samples, "val_samples")
        modes = ("train", "val") if val_tasks else ("train",)
        served = with_policy(settings.resources, LLM(model=MODEL_NAME), algorithm.served_models)
        inputs.agent.check(served, modes)
        agents = trained_agents_pattern(inputs.agent, adapter, algorithm)
        trained = plan_training(settings, algorithm, requested, tasks, agents)
        check_has_run(resume, requested)
        return cls(
            settings=trained,
            requested=requested,
            total_steps=trained.training.total_steps,
            resume=resume,
            algorithm=trained.training.algorithm,
            tasks=tasks,
            inputs=inputs,
            val_tasks=val_tasks,
        )

    def loop(self, components: PolicyComponents, report: Report) -> PolicyLoop:
        return PolicyLoop(components, self.tasks, self.val_tasks, report, self.state_config)


@dataclass(kw_only=True)
class OnlineRun(ServedTrainingRun):
    """A run that trains a policy on sessions, which agents outside the run open.

    Attributes:
        stop: ends the training after the update in progress.
    """

    stop: StopRequest = field(default_factory=StopRequest)

    @classmethod
    def plan(
        cls,
        settings: RolloutSettings,
        algorithm: PolicyAlgorithm,
        requested: RunSettings,
        resume: Resume = False,
    ) -> Self:
        """Return the run of a server that learns.

        Args:
            settings: those that the Trainer gives every run, with the settings of the sessions.
            requested: settings of the Trainer, as the algorithm adjusts them.

        Raises:
            ConfigError, ModelNotFoundError, BrokenPackageError: the run could not work.
        """
        if algorithm.served_models:
            raise ConfigError(
                "sessions train one model without opponents; leave models and opponents out, or use "
                "Trainer.fit"
            )
        trained = plan_training(settings, algorithm, requested, SESSION_TASKS, None)
        check_has_run(resume, requested)
        serving = replace(trained.serving, route="/", session_rules=SessionRules(algorithm.group_size))
        # there are no runners: one deadline is for the start of all
        start = {"start_timeout_s": serving.engine.start_timeout_s}
        runner = trained.runner.model_copy(update=start)
        steps = trained.training.total_steps
        return cls(
            settings=replace(trained, serving=serving, runner=runner),
            requested=requested,
            total_steps=0 if steps == ENDLESS else steps,
            resume=resume,
            algorithm=trained.training.algorithm,
            tasks=SESSION_TASKS,
        )

    @property
    def remedy(self) -> str:
        return f"Go on with `raylight serve --learn --resume --output-dir {self.folder}`"

    def loop(self, components: PolicyComponents, report: Report) -> PolicyLoop:
        return PolicyLoop(components, self.tasks, [], report, self.state_config, self.stop, SessionGroups)


def plan_training(
    settings: RolloutSettings,
    algorithm: PolicyAlgorithm,
    requested: RunSettings,
    tasks: TaskSet,
    trained_agents: str | None,
) -> TrainedSettings:
    """Return the settings of a run that trains a policy, as far as they are known without a cluster.

    Args:
        settings: those that the Trainer gives every run.
        requested: settings of the Trainer, as the algorithm adjusts them.
        trained_agents: pattern of the agents whose calls are trained on; None: all.

    Raises:
        ConfigError, ModelNotFoundError, BrokenPackageError: the run could not work.
    """
    engine, learner, checkpoint = requested.engine, requested.learner, requested.checkpoint
    check_lengths(engine, learner)
    check_models(algorithm, learner)
    algorithm.check_adapter(learner.lora is not None)
    check_packages()
    serving = ServingSettings(
        resolve_model(algorithm.model),
        trainable_engine(engine, learner),
        sampling_parameters=algorithm.sampling_parameters,
        training_temperature=algorithm.training_temperature,
        models=algorithm.served_models,
    )
    if tasks.size is None and algorithm.n_steps is None:
        raise ConfigError(
            f"the length of {type(tasks).__name__}, the train_dataset, is not known, and so the training has "
            "no end; set n_steps"
        )
    if isinstance(settings.group_reward, ProcessReward) and not algorithm.turn_rewards:
        raise ConfigError(
            "nothing reads the rewards of turns that group_reward=each_turn(...) gives; set "
            f"turn_rewards=True of {type(algorithm).__name__}"
        )
    teachers = plan_teachers(algorithm, serving.model_path)
    for teacher in teachers.values():
        check_stays(teacher.config.model, settings.folder)
        if isinstance(teacher, RankTeacher) and learner.kind == "local":
            raise ConfigError(
                "a local learner has no ranks that a teacher could be on; remove learner.kind='local', or "
                "set divergence='sampled', which a teacher with dedicated engines can give"
            )
    algorithm = algorithm.with_teachers({name: one.config for name, one in teachers.items()})
    url = resolve_state_url(checkpoint.path or str(Path(settings.folder, "state")))
    steps = algorithm.steps(tasks.size or 0)
    training = TrainingSettings(algorithm, learner, checkpoint, url, steps, trained_agents, teachers)
    return TrainedSettings.extending(
        settings,
        rollout=algorithm.rollout,
        serving=serving,
        training=training,
        reward_models=plan_reward_models(settings.group_reward),
    )
