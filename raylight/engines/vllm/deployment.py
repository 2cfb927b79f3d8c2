"""The `LLMConfig` with which `ray.serve.llm` deploys vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raylight.engines.vllm.args import runs_in_core, workers_per_replica

CPU_CACHE_GIB = 1
"""Key-value cache of a CPU replica in GiB, unless `VLLM_CPU_KVCACHE_SPACE` is set."""


def llm_config(
    path: str,
    model: str,
    args: Mapping[str, Any],
    *,
    server: type,
    num_cpus: float,
    threads: int,
    gpus: float,
    resources: Mapping[str, float] | None = None,
    env: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Return an `LLMConfig`.

    Args:
        args: result of `vllm_args`.
        server: the deployment class.
        num_cpus: CPUs per replica.
        threads: compute threads per replica, on a CPU.
        gpus: GPUs per worker; a replica has `tensor_parallel_size` x `pipeline_parallel_size` workers. 0 for
            a CPU.
        resources: custom resources of each worker.
        env: environment of the replica and its workers.
        options: Ray Serve's deployment options, including the number of replicas.
    """
    from ray.serve.llm import LLMConfig

    workers = workers_per_replica(args)
    env = (_loopback(args) if gpus == 0 or workers == 1 else {}) | dict(env or {})
    # A single worker shares the GPU of the replica's actor. Several are actors of vLLM's Ray executor, and
    # the replica's actor requests nothing: it runs in the bundle of its first worker.
    owns_gpu = gpus > 0 and runs_in_core(args)
    bundles: list[dict[str, float]] = (
        [{"CPU": num_cpus}] if gpus == 0 or owns_gpu else [{"GPU": gpus} for _ in range(workers)]
    )
    bundles[0]["CPU"] = num_cpus
    bundles = [bundle | dict(resources or {}) for bundle in bundles]
    # the parts of a tensor exchange data in every layer, so they share a node; pipeline stages need not
    strategy = "STRICT_PACK" if args.get("pipeline_parallel_size", 1) == 1 else "PACK"
    settings: dict[str, Any] = {
        "model_loading_config": {"model_id": model, "model_source": path},
        # Ray's kind "cpu" means: no Ray executor, and no task that looks at a GPU before the engine starts
        "accelerator_config": {"kind": "cpu"} if gpus == 0 or owns_gpu else None,
        "placement_group_config": {"bundles": bundles, "strategy": strategy},
        "engine_kwargs": dict(args),
        "runtime_env": {"env_vars": environment(path, threads, gpus, args.get("enforce_eager", False)) | env},
        "deployment_config": {
            "ray_actor_options": {"num_cpus": 0, "num_gpus": gpus if owns_gpu else 0},
            **(options or {}),
        },
        "server_cls": server,
    }
    return LLMConfig(**settings)


def _loopback(args: Mapping[str, Any]) -> dict[str, str]:
    """Return the environment with which a replica on one node listens on loopback: torch's store has no key.

    Connectors of key-value caches announce the address to other nodes, so they need the node's own.
    """
    if "kv_transfer_config" in args or "VLLM_HOST_IP" in os.environ:
        return {}
    return {"VLLM_HOST_IP": "127.0.0.1"}


def environment(path: str, threads: int, gpus: float, eager: bool) -> dict[str, str]:
    """Return environment variables for vLLM; variables of vLLM that are already set keep their values."""
    # the V2 runner has no place where the policy's log-probs of constrained answers can be recorded
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    if Path(path).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    if 0 < gpus < 1:  # else each worker of the Ray executor asks for a whole GPU
        variables["VLLM_RAY_PER_WORKER_GPUS"] = f"{gpus:g}"
    if gpus == 0:
        # by default, vLLM binds every replica on a machine to the same cores
        variables |= {"VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GIB), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if eager:  # else it compiles its sampler at the first request, for most of a minute
            variables["TORCHDYNAMO_DISABLE"] = "1"
    variables = {name: os.environ.get(name, value) for name, value in variables.items()}
    return variables | ({"OMP_NUM_THREADS": str(threads)} if gpus == 0 else {})
