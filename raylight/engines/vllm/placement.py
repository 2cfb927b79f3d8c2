"""Placement of vLLM: the resources of a replica and of its workers, and their environment.

The driver calls this module, and imports neither vLLM nor torch for it: that takes half a minute on a cold
disk.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from raylight.config import EngineConfig, cpu_threads
from raylight.engines.start_stages import VARIABLE as STAGES_VARIABLE
from raylight.engines.vllm.args import runs_in_core, workers_per_replica
from raylight.types import JsonObject

CPU_CACHE_GIB = 1
"""Key-value cache of a CPU replica in GiB, unless `VLLM_CPU_KVCACHE_SPACE` is set."""


@dataclass(frozen=True)
class Placement:
    """The resources of a replica.

    Attributes:
        bundles: the bundles of its placement group. The replica's actor runs in the first one.
        strategy: how Ray distributes the bundles to nodes.
        actor_gpus: GPUs of the replica's actor.
    """

    bundles: list[dict[str, float]]
    strategy: str
    actor_gpus: float


def place(config: EngineConfig) -> Placement:
    """Return the resources of a replica.

    It has `config.num_cpus` CPUs, and `config.num_gpus` GPUs for each of its `tensor_parallel_size` x
    `pipeline_parallel_size` workers. A single worker runs in vLLM's engine core, on the GPU of the replica's
    actor. Several are actors of vLLM's Ray executor, each in its bundle, and the replica's actor requests no
    GPU.
    """
    gpus, args = config.num_gpus, config.args
    workers = 1 if gpus == 0 else workers_per_replica(args)
    bundles = [{"GPU": gpus} if gpus else {} for _ in range(workers)]
    bundles[0]["CPU"] = config.num_cpus
    # the parts of a tensor exchange data in every layer, so they share a node; pipeline stages need not
    strategy = "STRICT_PACK" if args.get("pipeline_parallel_size", 1) == 1 else "PACK"
    return Placement(
        [bundle | config.resources for bundle in bundles], strategy, gpus if runs_in_core(args) else 0
    )


def serve_options(config: EngineConfig, model_path: str) -> JsonObject:
    """Return Ray Serve's options of a deployment whose replicas run vLLM."""
    placement = place(config)
    return {
        "placement_group_bundles": placement.bundles,
        "placement_group_strategy": placement.strategy,
        "ray_actor_options": {
            "num_cpus": 0,  # part of the first bundle, which the actor has for itself
            "num_gpus": placement.actor_gpus,
            "runtime_env": {"env_vars": environment(config, model_path)},
        },
    }


def environment(config: EngineConfig, model_path: str) -> dict[str, str]:
    """Return the environment of a replica and its workers; variables of vLLM that are already set keep their
    values."""
    gpus, args = config.num_gpus, config.args
    # the V2 runner has no place where the policy's log-probs of constrained answers can be recorded
    variables = {"VLLM_NO_USAGE_STATS": "1", "VLLM_USE_V2_MODEL_RUNNER": "0"}
    if Path(model_path).is_dir():
        variables["HF_HUB_OFFLINE"] = "1"
    if 0 < gpus < 1:  # else each worker of the Ray executor asks for a whole GPU
        variables["VLLM_RAY_PER_WORKER_GPUS"] = f"{gpus:g}"
    if gpus == 0:
        # by default, vLLM binds every replica on a machine to the same cores
        variables |= {"VLLM_CPU_KVCACHE_SPACE": str(CPU_CACHE_GIB), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        if args.get("enforce_eager", True):  # else it compiles its sampler at the first request, for a minute
            variables["TORCHDYNAMO_DISABLE"] = "1"
    if (gpus == 0 or workers_per_replica(args) == 1) and "kv_transfer_config" not in args:
        # Torch's store has no key, so it listens on loopback where it can. Connectors of key-value caches
        # announce the address to other nodes.
        variables["VLLM_HOST_IP"] = "127.0.0.1"
    variables = {name: os.environ.get(name, value) for name, value in variables.items()}
    copied = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"  # from the replica to the workers of the Ray executor
    variables[copied] = ",".join(filter(None, (os.environ.get(copied), STAGES_VARIABLE)))
    return variables | ({"OMP_NUM_THREADS": str(cpu_threads(config))} if gpus == 0 else {})
