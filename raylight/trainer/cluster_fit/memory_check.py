"""Check of a run's memory before it starts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import ray

from raylight.engines.registry import engine_traits
from raylight.errors import ConfigError
from raylight.trainer.cluster_fit.cluster_shape import GIB, ClusterShape, this_machine
from raylight.trainer.cluster_fit.engine_nodes import ask_nodes
from raylight.trainer.cluster_fit.hardware import pack_gpus
from raylight.trainer.spec.settings import TrainedSettings

TOLERANCE = 1.15
"""Factor by which planned memory may exceed the available memory before a run is refused: the plan is not
more exact."""
SMALL_MODEL = 30
"""A model whose files, times this factor, fit into the memory is not planned: it fits in any case."""


def check_memory(settings: TrainedSettings) -> None:
    """Check that a run's model fits on the connected cluster, with however short rollouts.

    Nodes that an autoscaler has yet to start are unknown, so a run that asks for more GPUs than there are is
    not checked; the placement of its roles raises its own error if they do not appear.

    Raises:
        ConfigError: it does not; the message lists what is missing and what to change.
    """
    serving, training = settings.serving, settings.training
    if not engine_traits(serving.engine.kind).loads_model or training.learner.kind != "ranks":
        return
    needed = SMALL_MODEL * _size_of_files(serving.model_path) + 4 * GIB
    scoring = settings.scoring_models
    needed += SMALL_MODEL * sum(_size_of_files(model.model_path) for model in scoring)
    asked = len(pack_gpus(training.learner, serving.engine, *(model.engine for model in scoring)))
    if not asked and needed < this_machine().memory:  # no other node need be asked
        return
    cluster = connected_cluster()
    if asked > cluster.gpus or (not cluster.gpus and needed < cluster.memory):
        return
    from raylight.trainer.cluster_fit.memory_plan import PlannedRun, make_plan

    run = PlannedRun.of(settings)
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
