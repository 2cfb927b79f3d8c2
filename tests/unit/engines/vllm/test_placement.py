"""Resources and environment of vLLM's replicas."""

from pathlib import Path
from typing import Any

import pytest

from raylight.config import EngineConfig
from raylight.engines.vllm.placement import Placement, environment, place, serve_options


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(kind="vllm", **settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_cpus": 0.5}, Placement([{"CPU": 0.5}], "STRICT_PACK", 0)),
        # vLLM on a CPU starts the parts of a tensor itself
        (
            {"num_cpus": 2, "args": {"tensor_parallel_size": 2}},
            Placement([{"CPU": 2}], "STRICT_PACK", 0),
        ),
        # one worker: the replica's actor owns the share, and vLLM's core runs the worker
        ({"num_cpus": 1, "num_gpus": 0.4}, Placement([{"GPU": 0.4, "CPU": 1}], "STRICT_PACK", 0.4)),
        ({"num_cpus": 1, "num_gpus": 1}, Placement([{"GPU": 1, "CPU": 1}], "STRICT_PACK", 1)),
        # several: Ray's executor places them, and the replica's actor is in the bundle of the first
        (
            {"num_cpus": 1, "num_gpus": 0.4, "args": {"tensor_parallel_size": 2}, "resources": {"e": 1}},
            Placement([{"GPU": 0.4, "CPU": 1, "e": 1}, {"GPU": 0.4, "e": 1}], "STRICT_PACK", 0),
        ),
        (
            {"num_cpus": 1, "num_gpus": 1, "args": {"distributed_executor_backend": "ray"}},
            Placement([{"GPU": 1, "CPU": 1}], "STRICT_PACK", 0),
        ),
        (
            {"num_cpus": 1, "num_gpus": 1, "args": {"pipeline_parallel_size": 2}},
            Placement([{"GPU": 1, "CPU": 1}, {"GPU": 1}], "PACK", 0),
        ),
    ],
)
def test_bundles_of_a_replica(settings: dict[str, Any], expected: Placement) -> None:
    assert place(config(**settings)) == expected
    options = serve_options(config(**settings), "m")
    assert options["placement_group_bundles"] == expected.bundles
    assert options["ray_actor_options"]["num_gpus"] == expected.actor_gpus


def test_the_environment_of_a_replica(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    cpu = environment(config(), str(tmp_path))
    assert cpu["HF_HUB_OFFLINE"] == cpu["VLLM_CPU_KVCACHE_SPACE"] == cpu["TORCHDYNAMO_DISABLE"] == "1"
    assert cpu["OMP_NUM_THREADS"] == "1"
    assert cpu["VLLM_HOST_IP"] == "127.0.0.1"
    assert "TORCHDYNAMO_DISABLE" not in environment(config(args={"enforce_eager": False}), "m")
    share = environment(config(num_gpus=0.4), "hub/name")
    assert share["VLLM_RAY_PER_WORKER_GPUS"] == "0.4"
    assert not {"HF_HUB_OFFLINE", "VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS"} & share.keys()
    wide = environment(config(num_gpus=1, args={"tensor_parallel_size": 2}), "m")
    assert not {"VLLM_RAY_PER_WORKER_GPUS", "VLLM_HOST_IP"} & wide.keys()
    assert "VLLM_HOST_IP" not in environment(config(num_gpus=1, args={"kv_transfer_config": {}}), "m")
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    assert environment(config(), "m")["VLLM_HOST_IP"] == "10.0.0.7"
