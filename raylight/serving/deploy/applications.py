"""The Serve application of each engine, from the settings."""

from __future__ import annotations

from typing import Any

from ray import serve

from raylight.config import cpu_threads
from raylight.serving.deploy.ingress import SERVE_FLAGS
from raylight.serving.deploy.replica import EngineReplica, ReplicaSpec


def application(spec: ReplicaSpec, started_serve: bool) -> serve.Application:
    """What Serve is to run.

    Args:
        started_serve: Serve was started by raylight, with its flags; replicas need them too.
    """
    env = SERVE_FLAGS if started_serve else {}
    return _vllm(spec, env) if spec.config.kind == "vllm" else _plain(spec, env)


def _plain(spec: ReplicaSpec, env: dict[str, str]) -> serve.Application:
    """The transformers engine, or one upstream: one actor a replica."""
    config = spec.config
    actor: dict[str, Any] = {
        "num_cpus": config.num_cpus,
        "num_gpus": config.num_gpus,
        "runtime_env": {"env_vars": env},
    }
    deployment = serve.deployment(name="engine", ray_actor_options=actor, **common_options(spec))(
        EngineReplica
    )
    if config.num_gpus:
        deployment = deployment.options(
            placement_group_bundles=[{"CPU": config.num_cpus, "GPU": config.num_gpus}]
        )
    return deployment.bind(spec)


def _vllm(spec: ReplicaSpec, env: dict[str, str]) -> serve.Application:
    """vLLM as `ray.serve.llm` deploys it: the replica, and a worker for each GPU."""
    from ray.serve.llm import build_llm_deployment

    from raylight.engines.vllm.args import vllm_args
    from raylight.engines.vllm.deployment import llm_config
    from raylight.serving.deploy.vllm_replica import VllmReplica

    config = spec.config
    args = vllm_args(
        spec.model_path,
        config.args,
        dtype=config.dtype,
        max_model_len=config.max_model_len,
        max_concurrent=config.max_concurrent,
        max_waiting=config.max_waiting,
        seed=spec.seed,
        gpus=config.num_gpus,
        max_adapters=config.max_adapters,
    )
    llm = llm_config(
        spec.model_path,
        spec.model,
        args,
        server=VllmReplica,
        num_cpus=config.num_cpus,
        threads=cpu_threads(config),
        gpus=config.num_gpus,
        env=env,
        options=common_options(spec),
    )
    return build_llm_deployment(llm, bind_kwargs={"spec": spec})


def common_options(spec: ReplicaSpec) -> dict[str, Any]:
    """Options of a deployment that do not depend on the engine."""
    config = spec.config
    most = config.max_concurrent + config.max_waiting
    options: dict[str, Any] = {
        "max_ongoing_requests": most,
        "graceful_shutdown_timeout_s": 2,
        "graceful_shutdown_wait_loop_s": 0.1,
    }
    if config.max_replicas is None or config.max_replicas == config.replicas:
        return options | {"num_replicas": config.replicas}
    scaling = {
        "min_replicas": config.replicas,
        "max_replicas": config.max_replicas,
        "target_ongoing_requests": config.max_concurrent,
    }
    return options | {"autoscaling_config": scaling}
