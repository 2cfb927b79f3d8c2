"""Memory of a run before it starts: `raylight plan`, and the check at the start of a run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from raylight.algorithms.policy import PolicyAlgorithm, RunSettings
from raylight.config import EngineConfig, RunnerConfig
from raylight.engines.registry import choose_engine
from raylight.engines.vllm.args import asked_gpus
from raylight.errors import ConfigError
from raylight.rewards.group import GroupReward
from raylight.trainer.cluster_fit.cluster_shape import GIB, ClusterShape, this_machine
from raylight.trainer.cluster_fit.engine_nodes import ask_nodes
from raylight.trainer.cluster_fit.hardware import Hardware, choose, workload
from raylight.trainer.cluster_fit.reward_model_settings import on_hardware, plan_reward_models
from raylight.trainer.cluster_fit.teacher_settings import fitted_engine, plan_teacher
from raylight.trainer.spec.inputs import resolve_model
from raylight.trainer.spec.settings import TrainedSettings

if TYPE_CHECKING:
    from raylight.trainer.cluster_fit.memory_plan import MemoryPlan

TOLERANCE = 1.15
"""Factor by which planned memory may exceed the memory that there is before a run is refused: the plan is not
more exact."""
SMALL_MODEL = 30
"""A model whose files, times this factor, fit into the memory is not planned: it fits in any case."""
PLANNED_ENGINES = ("vllm", "transformers")


def plan_settings(
    algorithm: Any,
    settings: RunSettings,
    runner: RunnerConfig,
    cluster: ClusterShape,
    group_reward: GroupReward | None = None,
) -> MemoryPlan:
    """Return the memory plan of a run, with the defaults for the cluster's hardware.

    Args:
        settings: the run's, as the algorithm adjusts them.
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

    settings = settings.for_hardware(cluster.gpus)
    engine, learner = settings.engine, settings.learner
    if learner.kind != "ranks":
        raise ConfigError(
            f"there are no ranks to plan for with learner.kind={learner.kind!r}; a local learner's memory is "
            "shown, and checked, when its run starts"
        )
    model_path = resolve_model(algorithm.model)
    kind = _planned_engine(engine, cluster)
    if kind not in PLANNED_ENGINES:
        raise ConfigError(
            f"the memory of the engine {kind!r:.100} is not known, and a plan does not import it; plan with "
            f"--set engine.kind={' or '.join(PLANNED_ENGINES)}"
        )
    teacher = plan_teacher(algorithm, model_path)
    policy = algorithm.policy_settings()
    work = workload(Path(model_path), policy, learner)
    reward_models = [on_hardware(one).serving for one in plan_reward_models(group_reward)]
    models = [*reward_models, *(() if teacher is None else (teacher.serving,))]
    gpus = cluster.gpus - sum(asked_gpus(model.engine) for model in models)
    hardware = Hardware(max(gpus, 0), gpu_memory=cluster.gpu_memory)
    choice = choose(hardware, engine.model_copy(update={"kind": kind}), learner, work)
    planned = None
    if teacher is not None:
        scoring = fitted_engine(teacher, choice.engine.max_model_len)
        planned = replace(teacher.serving, engine=scoring)
    run = PlannedRun(
        model_path,
        kind,
        choice.engine,
        choice.learner or learner,
        runner,
        policy,
        planned,
        tuple(reward_models),
    )
    return make_plan(run, cluster)


def _planned_engine(engine: EngineConfig, cluster: ClusterShape) -> str:
    """Return the engine of a run on a cluster. GPU nodes other than this machine are expected to have vLLM,
    as `cluster.yaml` installs it."""
    if engine.kind != "auto":
        return engine.kind
    if cluster.gpus and not this_machine().gpus and engine.url is None:
        return "vllm"
    return choose_engine(engine.model_copy(update={"num_gpus": 1}) if cluster.gpus else engine)


def check_memory(settings: TrainedSettings) -> None:
    """Check that a run's model fits on the connected cluster, with however short rollouts.

    Nodes that an autoscaler has yet to start are unknown, so a run that asks for more GPUs than there are is
    not checked; the placement of its roles fails with an error of its own if they do not appear.

    Raises:
        ConfigError: it does not; the message lists what is missing and what to change.
    """
    serving, training = settings.serving, settings.training
    if serving.engine.kind not in PLANNED_ENGINES or training.learner.kind != "ranks":
        return
    needed = SMALL_MODEL * _size_of_files(serving.model_path) + 4 * GIB
    learner, teacher = training.learner, training.teacher
    asked = learner.n * learner.num_gpus + asked_gpus(serving.engine)
    for model in settings.scoring_models:
        needed += SMALL_MODEL * _size_of_files(model.model_path)
        asked += asked_gpus(model.engine)
    if not asked and needed < this_machine().memory:  # no other node need be asked
        return
    cluster = connected_cluster()
    if asked > cluster.gpus or (not cluster.gpus and needed < cluster.memory):
        return
    from raylight.trainer.cluster_fit.memory_plan import PlannedRun, make_plan

    run = PlannedRun(
        serving.model_path,
        serving.engine.kind,
        serving.engine,
        learner,
        settings.runner,
        training.algorithm.policy_settings(),
        None if teacher is None else teacher.serving,
        tuple(one.serving for one in settings.reward_models),
    )
    if not make_plan(run, _enlarged(cluster), at_peak=False).shortages:
        return
    exact = make_plan(run, cluster, at_peak=False)
    lacks = "; ".join(shortage.message for shortage in exact.shortages)
    remedy = f"It fits with {', '.join(exact.remedies)}" if exact.remedies else "Take a smaller model"
    raise ConfigError(
        f"the run does not fit on the cluster: {lacks}. {remedy}; `raylight plan` shows the memory of each "
        "part"
    )


def connected_cluster() -> ClusterShape:
    """Return the machines of the connected cluster.

    Raises:
        ConfigError: a node cannot load raylight, or does not respond.
    """
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    return ClusterShape(tuple(ask_nodes(nodes, this_machine).values()))


def _enlarged(cluster: ClusterShape) -> ClusterShape:
    """Return the cluster with more memory, by the tolerance."""
    return ClusterShape(
        tuple(
            replace(node, memory=int(TOLERANCE * node.memory), gpu_memory=int(TOLERANCE * node.gpu_memory))
            for node in cluster.nodes
        )
    )


def _size_of_files(model_path: str) -> int:
    """Return the bytes of a model's weight files."""
    files = (file for pattern in ("*.safetensors", "*.bin") for file in Path(model_path).glob(pattern))
    return sum(file.stat().st_size for file in files)
