"""The Serve application of an engine, built from a replica's settings."""

from __future__ import annotations

from typing import Any

from ray import serve

from raylight.components import import_dotted_name
from raylight.config import EngineConfig
from raylight.engines.registry import ENGINES
from raylight.errors import EngineStartError
from raylight.http.request import MAX_ARRIVING
from raylight.serving.deploy.ingress import alive_nodes
from raylight.serving.deploy.replica import EngineReplica, ReplicaSettings

HEALTH_CHECK_PERIOD_S = 5.0
HEALTH_CHECK_TIMEOUT_S = 15.0
"""Serve replaces a replica after three health checks in a row without a response: a frozen one within 50 s,
long before the default deadline of a weight sync. A busy machine delays a response by seconds only."""

MIN_SHUTDOWN_S = 2.0
"""Time in which a replica without requests flushes its records and leaves the coordinator."""


def build_application(settings: ReplicaSettings, env: dict[str, str]) -> serve.Application:
    """Build the application that Serve is to run.

    Args:
        env: the flags with which raylight started Serve; the replicas need them too.
    """
    config = settings.config
    check_node_size(config, [node["Resources"] for node in alive_nodes()])
    built_in = ENGINES.get(config.kind)
    if built_in is not None and built_in.serve_options is not None:
        make = import_dotted_name(built_in.serve_options, "EngineConfig.kind", is_ours=True)
        options = make(config, settings.model_path)
    else:
        options = one_actor(config)
    environment = options["ray_actor_options"].setdefault("runtime_env", {}).setdefault("env_vars", {})
    environment |= env
    return serve.deployment(name="engine", **options, **common_options(settings))(EngineReplica).bind(
        settings
    )


def one_actor(config: EngineConfig) -> dict[str, Any]:
    """Return Serve's options of an engine that lives in one actor per replica."""
    actor = {"num_cpus": config.num_cpus, "num_gpus": config.num_gpus, "resources": config.resources}
    options: dict[str, Any] = {"ray_actor_options": actor}
    if config.num_gpus:
        options["placement_group_bundles"] = [
            {"CPU": config.num_cpus, "GPU": config.num_gpus, **config.resources}
        ]
    return options


def check_node_size(config: EngineConfig, nodes: list[dict[str, float]]) -> None:
    """Raise if the parts of a tensor-parallel engine cannot be on one node.

    Nothing is known about a cluster without GPUs, whose nodes the autoscaler has yet to start.

    Args:
        nodes: resources of the nodes.

    Raises:
        EngineStartError: every node with GPUs has too few for an engine.
    """
    parts, stages = (config.args.get(f"{name}_parallel_size", 1) for name in ("tensor", "pipeline"))
    largest = max((node.get("GPU", 0.0) for node in nodes), default=0.0)
    needed = parts * config.num_gpus
    if parts > 1 and stages == 1 and 0 < largest < needed:
        raise EngineStartError(
            f"tensor_parallel_size={parts} needs {needed:g} GPUs on one node, and the largest node has "
            f"{largest:g}. Lower it to {int(largest / config.num_gpus)} and divide the layers between nodes, "
            "by engine={'args': {'pipeline_parallel_size': ...}}; or add a node with more GPUs before the run"
        )


def common_options(settings: ReplicaSettings) -> dict[str, Any]:
    """Deployment options that do not depend on the engine."""
    config = settings.config
    options: dict[str, Any] = {
        # bodies that arrive are counted too: without room for them, half-sent ones would lock out everybody
        "max_ongoing_requests": config.max_concurrent + config.max_waiting + MAX_ARRIVING,
        "graceful_shutdown_timeout_s": max(config.drain_timeout_s, MIN_SHUTDOWN_S),
        "graceful_shutdown_wait_loop_s": 0.1,
        "health_check_period_s": HEALTH_CHECK_PERIOD_S,
        "health_check_timeout_s": HEALTH_CHECK_TIMEOUT_S,
    }
    if not config.autoscales:
        return options | {"num_replicas": config.replicas}
    scaling = {
        "min_replicas": config.replicas,
        "max_replicas": config.max_replicas,
        "target_ongoing_requests": config.target_ongoing_requests or config.max_concurrent,
    }
    return options | {"autoscaling_config": scaling}
