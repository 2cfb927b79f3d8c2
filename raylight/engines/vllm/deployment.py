"""What `ray.serve.llm` needs to deploy vLLM."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CPU_CACHE_GIB = 1
"""Key-value cache of a CPU replica, unless `VLLM_CPU_KVCACHE_SPACE` says otherwise."""


def llm_config(
    path: str,
    model: str,
    args: Mapping[str, Any],
    *,
    server: type,
    num_cpus: float,
    threads: int,
    gpus: float,
    env: Mapping[str, str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """An `LLMConfig`.

    Args:
        args: what `vllm_args` gives.
        server: the deployment class.
        num_cpus: of each replica.
        threads: that each computes with, on a CPU.
        gpus: of each of a replica's `tensor_parallel_size` x `pipeline_parallel_size` workers; 0 for a CPU.
        env: variables of the replica's and its workers' processes.
        options: Ray Serve's deployment options, the number of replicas among them.
    """
    from ray.serve.llm import LLMConfig

    workers = args.get("tensor_parallel_size", 1) * args.get("pipeline_parallel_size", 1)
    # The replica itself takes nothing: its bundle is that of its first worker.
    bundles: list[dict[str, float]] = (
        [{"CPU": num_cpus}] if gpus == 0 else [{"GPU": gpus} for _ in range(workers)]
    )
    bundles[0]["CPU"] = num_cpus
    settings: dict[str, Any] = {
        "model_loading_config": {"model_id": model, "model_source": path},
        "accelerator_config": {"kind": "cpu"} if gpus == 0 else None,
        "placement_group_config": {"bundles": bundles},
        "engine_kwargs": dict(args),
        "runtime_env": {
            "env_vars": environment(path, threads, gpus, args.get("enforce_eager", False)) | dict(env or {})
        },
        "deployment_config": {"ray_actor_options": {"num_cpus": 0}, **(options or {})},
        "server_cls": server,
    }
    return LLMConfig(**settings)


def environment(path: str, threads: int, gpus: float, eager: bool) -> dict[str, str]:
    """Variables that vLLM reads when it starts; those of vLLM's own that are set already stay as they are."""
    found = {"VLLM_NO_USAGE_STATS": "1"}
    if Path(path).is_dir():
        found["HF_HUB_OFFLINE"] = "1"
    if gpus == 0:
        # left alone, vLLM binds every replica of a machine to the same cores
        found |= {"VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GIB), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if eager:  # it would compile its sampler all the same, at the first request, for most of a minute
            found["TORCHDYNAMO_DISABLE"] = "1"
    found = {name: os.environ.get(name, value) for name, value in found.items()}
    return found | ({"OMP_NUM_THREADS": str(threads)} if gpus == 0 else {})
