"""The engine that runs on the cluster's GPU nodes, by the packages that are installed there.

The driver checks arguments by vLLM's files, and replicas run it on nodes with GPUs. Both need vLLM. Learners
and engines of a model that reads images need the same package for scaling.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TypeVar

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

from raylight.config import EngineConfig, LearnerConfig
from raylight.engines.registry import choose_engine, engine_traits, has_vllm
from raylight.errors import ConfigError, summarize_ray_error

Answer = TypeVar("Answer")
ANSWER_TIMEOUT_S = 60.0
"""Longest time for a task on a node, which may have to start a process."""


def engine_on_nodes(requested: EngineConfig, engine: EngineConfig) -> EngineConfig:
    """Return the engine's settings with the kind that the GPU nodes can run.

    Nothing is known while no node has the GPUs: the autoscaler has yet to start them. The driver's packages
    then decide, which `cluster.yaml` installs on all nodes alike.

    Args:
        requested: the user's settings, whose kind may be "auto".
        engine: the same with the kind that the driver's packages gave.

    Raises:
        ConfigError: vLLM is missing on the driver's node or on a GPU node.
    """
    if not engine.num_gpus or not engine_traits(engine.kind).loads_model:
        return engine
    if requested.kind not in ("auto", "vllm"):
        return engine
    nodes = [node for node in ray.nodes() if node["Alive"] and can_run(engine, node["Resources"])]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes}
    answers = ask_nodes(addresses, has_vllm)
    return decide(requested, engine, has_vllm(), answers)


def can_run(part: EngineConfig | LearnerConfig, resources: dict[str, float]) -> bool:
    """Return True if a node has the devices and the custom resources of engines or learners."""
    device = "GPU" if part.num_gpus else "CPU"
    return all(resources.get(name, 0.0) > 0 for name in (device, *part.resources))


def decide(
    requested: EngineConfig, engine: EngineConfig, driver_has: bool, nodes: dict[str, bool]
) -> EngineConfig:
    """Return the engine's settings with the kind that the GPU nodes can run.

    Args:
        driver_has: True if vLLM is installed on the driver's node.
        nodes: True for each node with vLLM, by address.

    Raises:
        ConfigError: as for `engine_on_nodes`.
    """
    without = sorted(address for address, has in nodes.items() if not has)
    if not nodes or (driver_has and not without):
        return engine
    if requested.kind == "auto" and len(without) == len(nodes):
        transformers = requested.model_copy(update={"kind": "transformers"})
        return engine.model_copy(update={"kind": choose_engine(transformers)})
    place = f"the GPU node(s) {', '.join(without)}" if without else "the driver's node"
    others = "on other GPU nodes" if without and len(without) < len(nodes) else "on the driver's node"
    raise ConfigError(
        f"vLLM is not installed on {place}, and it is {others if without else 'on the GPU nodes'}; install "
        "raylight[vllm] on all nodes, as cluster.yaml does (the driver checks vLLM's arguments), or "
        "choose engine={'kind': 'transformers'}"
    )


def check_image_scaling(model_path: str, *parts: EngineConfig | LearnerConfig) -> None:
    """Check that transformers scales the images of a model in the same way on the driver's node and on all
    nodes that can run engines or learners.

    With torchvision its functions do, else Pillow's. Learners and engines would compute other pixels.

    Args:
        parts: settings of the engines and the learners.

    Raises:
        ConfigError: torchvision is installed on some of these nodes only.
    """
    if not _has_image_files(Path(model_path)):
        return
    driver = ray.get_runtime_context().get_node_id()
    nodes = {
        node["NodeID"]: node["NodeManagerAddress"]
        for node in ray.nodes()
        if node["Alive"]
        and (node["NodeID"] == driver or any(can_run(part, node["Resources"]) for part in parts))
    }
    answers = ask_nodes(nodes, has_torchvision)
    without = sorted(address for address, has in answers.items() if not has)
    if without and len(without) < len(answers):
        raise ConfigError(
            f"torchvision is not installed on {', '.join(without)}, and it is on other nodes, so that images "
            "would have other pixels there; install it on all nodes, or on none"
        )


def _has_image_files(folder: Path) -> bool:
    """Return True for a model with a vision part and a processor, which this node may be unable to load."""
    from raylight.images.model_inputs import PROCESSOR_FILES

    file = folder / "config.json"
    has_vision = file.is_file() and "vision_config" in json.loads(file.read_text())
    return has_vision and any((folder / name).is_file() for name in PROCESSOR_FILES)


def has_torchvision() -> bool:
    """Return True if torchvision is installed."""
    return find_spec("torchvision") is not None


def ask_nodes(nodes: dict[str, str], question: Callable[[], Answer]) -> dict[str, Answer]:
    """Return what a function returns on each node, by address.

    Args:
        nodes: address of each node, by node ID.
        question: a function of raylight.

    Raises:
        ConfigError: a node cannot load raylight, or does not respond.
    """
    own = ray.get_runtime_context().get_node_id()
    task = ray.remote(num_cpus=0, max_retries=0)(question)
    calls = {
        address: task.options(scheduling_strategy=OnNode(node_id, soft=False)).remote()
        for node_id, address in nodes.items()
        if node_id != own
    }
    answers = {nodes[own]: question()} if own in nodes else {}
    for address, call in calls.items():
        try:
            answers[address] = ray.get(call, timeout=ANSWER_TIMEOUT_S)
        except GetTimeoutError:
            raise ConfigError(
                f"the node {address} did not respond within {ANSWER_TIMEOUT_S:g} s; see "
                "`ray status` and the node's raylet.out"
            ) from None
        except RayError as error:
            raise ConfigError(
                f"the node {address} cannot load raylight: {summarize_ray_error(error)}; install the "
                "same version on all nodes (`raylight doctor` lists them)"
            ) from None
    return answers
