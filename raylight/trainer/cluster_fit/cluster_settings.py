"""Settings of a run that follow from the connected cluster: one function for each kind of settings,
and the plan of a run on a cluster that is not connected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from raylight.algorithms.policy import PolicyAlgorithm, RunSettings
from raylight.config import EngineConfig, LearnerConfig, RunnerConfig, SessionConfig, StoreConfig
from raylight.engines.registry import choose_engine, engine_traits, model_engines
from raylight.errors import ConfigError
from raylight.rewards.group import GroupReward
from raylight.trainer.cluster_fit.cluster_shape import ClusterShape, this_machine
from raylight.trainer.cluster_fit.hardware import (
    ClusterFacts,
    Hardware,
    PlannedFacts,
    at_once,
    count_parameters,
    fit_engine,
    learner_alone,
    on_cores,
    share_cores,
    workload,
)
from raylight.trainer.cluster_fit.memory_check import check_memory
from raylight.trainer.cluster_fit.policy_checks import (
    engine_on_device,
    engine_with_adapter,
    engine_with_routes,
    engine_with_transport,
    idle_hardware,
    with_mismatch_limit,
)
from raylight.trainer.cluster_fit.scoring_models import (
    fit_teacher,
    on_hardware,
    plan_reward_models,
    plan_teachers,
    without_images,
)
from raylight.trainer.spec.inputs import resolve_model
from raylight.trainer.spec.settings import (
    ServedSettings,
    ServingSettings,
    SupervisedRunSettings,
    TrainedSettings,
    TrainingSettings,
)

if TYPE_CHECKING:
    from raylight.trainer.cluster_fit.memory_plan import MemoryPlan


def fit_supervised(settings: SupervisedRunSettings, facts: ClusterFacts) -> SupervisedRunSettings:
    """Return the settings of a run that trains on given examples, for the cluster.

    Raises:
        ConfigError: a node with GPUs cannot load raylight.
    """
    training = settings.training
    work = workload(Path(training.model_path), None, None)
    learner = learner_alone(facts.hardware, training.learner, work)
    parameters = count_parameters(Path(training.model_path)) or 0
    learner = on_cores(facts.cores, parameters, learner)
    return replace(settings, training=replace(training, learner=learner))


def fit_served(
    settings: ServedSettings, requested: EngineConfig, facts: ClusterFacts
) -> tuple[ServedSettings, tuple[str, ...]]:
    """Return the settings of a run that serves a fixed model, for the cluster, and messages for the user.

    Args:
        requested: the user's settings of the engine, whose kind may be "auto".

    Raises:
        ConfigError: the engine does not fit on the GPUs, or a node cannot run it.
    """
    settings = replace(settings, reward_models=tuple(map(on_hardware, settings.reward_models)))
    serving, notes = fit_fixed(settings.serving, requested, facts, settings.scoring_models)
    return replace(settings, serving=serving), notes


def fit_fixed(
    serving: ServingSettings,
    requested: EngineConfig,
    facts: ClusterFacts,
    scoring: Sequence[ServingSettings] = (),
) -> tuple[ServingSettings, tuple[str, ...]]:
    """Return the settings of a model that nothing trains, for the cluster, and messages for the user.

    Args:
        requested: the user's settings of the engine, whose kind may be "auto".
        scoring: models that score for this one, which have their GPUs.

    Raises:
        ConfigError: as for `fit_served`.
    """
    if serving.engine.kind == "upstream":
        return serving, ()
    if not requested.num_gpus and "num_gpus" in requested.model_fields_set:
        hardware = Hardware(0.0)  # nodes with GPUs need not answer
    else:
        hardware = facts.hardware.without(*(model.engine for model in scoring))
    choice = fit_engine(hardware, serving, requested)
    engine = facts.engine_on_nodes(requested, choice.engine)
    parameters = count_parameters(Path(serving.model_path)) or 0
    return replace(serving, engine=on_cores(facts.cores, parameters, engine)), choice.notes


def fit_trained(
    settings: TrainedSettings, requested: RunSettings, facts: ClusterFacts
) -> tuple[TrainedSettings, tuple[str, ...]]:
    """Return the settings of a run that trains its served model, for the cluster, and messages for the user.

    Args:
        requested: the Trainer's, as the algorithm adjusts them.

    Raises:
        ConfigError: the run cannot work on this cluster.
    """
    engine, learner = settings.serving.engine, settings.training.learner
    if learner.kind == "local":
        settings = _with_parts(settings, engine_on_device(engine, learner), learner)
        return finish_trained(fit_scoring_models(settings)), ()
    settings, notes = fit_placed(settings, requested, facts)
    parts = settings.serving.engine, settings.training.learner
    facts.check_image_scaling(settings.serving.model_path, *parts)
    check_memory(settings)
    settings = finish_trained(_with_threads(settings, facts))
    learner = settings.training.learner
    if learner.kind == "ranks":
        idle = idle_hardware(settings.serving.engine, learner, facts.resources, settings.scoring_models)
        notes = (*notes, *idle)
    return settings, notes


def fit_placed(
    settings: TrainedSettings, requested: RunSettings, facts: ClusterFacts
) -> tuple[TrainedSettings, tuple[str, ...]]:
    """Return the settings with all that takes memory and devices, and messages for the user. `raylight plan`
    plans these."""
    engine = settings.serving.engine
    found = requested.for_hardware(facts.resources.get("GPU", 0))
    if found is not requested:
        fallback = found.engine.model_copy(update={"kind": engine.kind})
        settings = _with_parts(settings, fallback, found.learner)
    settings, notes = fit_hardware(settings, requested.engine, facts)
    return fit_scoring_models(settings), (*found.notes, *notes)


def fit_hardware(
    settings: TrainedSettings, requested: EngineConfig, facts: ClusterFacts
) -> tuple[TrainedSettings, tuple[str, ...]]:
    """Return the settings with engine, learners and runners for the cluster's nodes, and messages for the
    user.

    Raises:
        ConfigError: the engine or router replay does not fit.
    """
    training, runner = settings.training, settings.runner
    hardware = facts.hardware.without(*(model.engine for model in settings.scoring_models))
    policy = training.algorithm.policy_settings()
    choice = fit_engine(hardware, settings.serving, requested, training.learner, policy)
    engine = choice.engine
    if engine.num_gpus:
        rollouts = training.algorithm.tasks_per_step * training.algorithm.group_size
        if engine_traits(engine.kind).memory_arg:  # so that further sequences take no more memory
            engine = at_once(engine, rollouts, engine.replicas)
        runner = at_once(runner, rollouts, runner.n)
    engine = facts.engine_on_nodes(requested, engine)
    if training.learner.router_replay:
        engine = engine_with_routes(engine, settings.serving.model_path)
    settings = _with_parts(settings, engine, choice.learner or training.learner)
    return replace(settings, runner=runner), choice.notes


def _with_threads(settings: TrainedSettings, facts: ClusterFacts) -> TrainedSettings:
    serving, training = settings.serving, settings.training
    parameters = count_parameters(Path(serving.model_path)) or 0
    overlaps = training.algorithm.max_staleness > 0
    return _with_parts(
        settings, *share_cores(facts.cores, parameters, serving.engine, training.learner, overlaps)
    )


def plan_settings(
    algorithm: object,
    requested: RunSettings,
    runner: RunnerConfig,
    cluster: ClusterShape,
    group_reward: GroupReward | None = None,
) -> MemoryPlan:
    """Return the memory plan of a run, with the settings that it would have on a cluster.

    Args:
        requested: the run's settings, as the algorithm adjusts them.
        group_reward: the run's, which may name reward models.

    Raises:
        ConfigError: the algorithm trains no model, or there are too few GPUs.
        ModelNotFoundError: a model does not exist.
    """
    if not isinstance(algorithm, PolicyAlgorithm):
        raise ConfigError(
            f"{type(algorithm).__name__} trains no model with learners, so there is no memory to plan"
        )
    from raylight.trainer.cluster_fit.memory_plan import PlannedRun, make_plan

    learner = requested.learner
    if learner.kind != "ranks":
        raise ConfigError(
            f"there are no ranks to plan for with learner.kind={learner.kind!r}; a local learner's memory is "
            "shown, and checked, when its run starts"
        )
    model_path, engine = resolve_model(algorithm.model), requested.engine
    kind = _planned_engine(engine, cluster)
    if not engine_traits(kind).loads_model:
        raise ConfigError(
            f"the memory of the engine {kind!r:.100} is not known, and a plan does not import it; plan with "
            f"--set engine.kind={' or '.join(model_engines())}"
        )
    requested = replace(requested, engine=engine.model_copy(update={"kind": kind}))
    if engine.kind == "auto":
        engine = engine.model_copy(update={"kind": kind if engine.num_gpus else choose_engine(engine)})
    teachers = plan_teachers(algorithm, model_path)
    algorithm = algorithm.with_teachers({name: one.config for name, one in teachers.items()})
    settings = TrainedSettings(
        name="plan",
        folder="",
        seed=0,
        runner=runner,
        agents=SessionConfig(),
        secret="",
        store=StoreConfig(),
        store_path="",
        resources={},
        reward_models=plan_reward_models(group_reward),
        serving=ServingSettings(model_path, engine),
        training=TrainingSettings(algorithm, learner, requested.checkpoint, "", 0, None, teachers),
    )
    settings, _ = fit_placed(settings, requested, PlannedFacts(cluster))
    return make_plan(PlannedRun.of(settings), cluster)


def _planned_engine(engine: EngineConfig, cluster: ClusterShape) -> str:
    """Return the engine that a run has on the cluster's GPUs, or on CPUs without GPUs. GPU nodes other than
    this machine are expected to have vLLM, as `cluster.yaml` installs it."""
    if engine.kind != "auto":
        return engine.kind
    if cluster.gpus and "num_gpus" not in engine.model_fields_set:
        engine = engine.model_copy(update={"num_gpus": 1})
    if cluster.gpus and engine.num_gpus and not this_machine().gpus and engine.url is None:
        return "vllm"
    return choose_engine(engine)


def _with_parts(settings: TrainedSettings, engine: EngineConfig, learner: LearnerConfig) -> TrainedSettings:
    serving, training = settings.serving, settings.training
    return replace(
        settings, serving=replace(serving, engine=engine), training=replace(training, learner=learner)
    )


def fit_scoring_models(settings: TrainedSettings) -> TrainedSettings:
    """Return the settings with the teachers and reward models adjusted to the hardware and the engine.

    Raises:
        ConfigError: a teacher does not take rows as long as the policy's, or images that agents may send.
    """
    serving, training = settings.serving, settings.training
    if training.served_teachers:
        serving = replace(serving, engine=without_images(serving.engine))
    teachers = {
        name: fit_teacher(teacher, serving.model_path, serving.engine)
        for name, teacher in training.teachers.items()
    }
    training = replace(training, teachers=teachers)
    reward_models = tuple(map(on_hardware, settings.reward_models))
    return replace(settings, serving=serving, training=training, reward_models=reward_models)


def finish_trained(settings: TrainedSettings) -> TrainedSettings:
    """Return the settings with those that follow from the final engine and learners.

    Raises:
        ConfigError: the transport, the limit of mismatches or the adapter does not fit.
    """
    serving, training = settings.serving, settings.training
    learner, overlaps = training.learner, training.algorithm.max_staleness > 0
    engine = engine_with_transport(serving.engine, learner, overlaps)
    algorithm = with_mismatch_limit(training.algorithm, engine, learner, serving.model_path)
    if (lora := training.served_lora) is not None:
        served, opponents = len(training.adapters) * (2 if overlaps else 1), training.algorithm.opponents
        if opponents is not None:  # the initial one stays for validation, and one is exchanged for another
            served += opponents.pool + 2
        engine = engine_with_adapter(engine, serving.model_path, lora, served)
    settings = _with_parts(settings, engine, learner)
    return replace(settings, training=replace(training, algorithm=algorithm))
