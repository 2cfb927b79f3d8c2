"""Each transport of weights, in a run whose engines and learners must agree after every update."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_shapes import SHAPES

VERSIONS = [1, 2, 3]
VLLM = {"kind": "vllm", "dtype": "bfloat16", "max_model_len": 2048}
BF16 = {"dtype": "bfloat16", "gradient_checkpointing": True}
NCCL = {"engine": VLLM | {"num_gpus": 1, "weight_transfer": "nccl"}, "learner": BF16 | {"num_gpus": 1}}
IPC = {
    "engine": VLLM
    | {
        "num_gpus": 0.4,
        "weight_transfer": "ipc",
        "sleep_while_learning": True,
        "args": {"enable_sleep_mode": True, "gpu_memory_utilization": 0.4},
    },
    "learner": BF16 | {"num_gpus": 0.6},
}
GLOO = {
    "engine": {
        "kind": "transformers",
        "weight_transfer": "gloo",
        "replicas": 2,
        "min_replicas": 2,
        "num_cpus": 0.2,
    },
    "learner": {"n": 2, "num_cpus": 0.4},
}
"""Two ranks send to two replicas."""


@pytest.mark.parametrize(
    ("shape", "device", "settings"),
    [
        pytest.param("tiny", "cpu", GLOO, id="gloo-tiny-cpu", marks=pytest.mark.slow),
        pytest.param("0.5B", "cuda", NCCL, id="nccl-0.5B", marks=pytest.mark.gpu(2)),
        pytest.param("1.5B", "cuda", NCCL, id="nccl-1.5B", marks=pytest.mark.gpu(2)),
        pytest.param("0.5B", "cuda", IPC, id="ipc-0.5B", marks=pytest.mark.gpu),
        pytest.param("1.5B", "cuda", IPC, id="ipc-1.5B", marks=pytest.mark.gpu),
    ],
)
def test_weights_reach_the_engines(
    shape: str,
    device: str,
    settings: dict[str, Any],
    tmp_path: Path,
    models: Callable[..., str],
    program: Callable[..., Any],
    figure: Callable[..., None],
) -> None:
    """Versions arrive by the chosen transport, and log-probs agree after each."""
    if settings["engine"]["kind"] == "vllm" and importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    found = program(
        "run_program.py", model=models(shape, device), device=device, folder=str(tmp_path / "run"), **settings
    )
    rows = [row for row in found["rows"] if "learner/grad_norm" in row]
    assert [row["weights/version"] for row in rows] == VERSIONS
    assert found["summary"]["rollouts_failed"] == found["summary"]["rollouts_lost"] == 0
    assert found["summary"]["counts"]["replicas_evicted"] == 0
    limit = 1e-3 if device == "cpu" else 5e-2
    assert max(row["mismatch/probe_abs_mean"] for row in rows) < limit
    sync = min(row["time/sync_s"] for row in rows)
    size = 4 if device == "cpu" else 2
    figure("publication, with the comparison", sync, "s")
    figure("weights", SHAPES[shape].parameters * size / 2**30, "GiB")
    figure("log-probs after a transfer, mean difference", rows[-1]["mismatch/probe_abs_mean"], "nats")
