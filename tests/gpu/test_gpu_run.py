"""A whole run: engine and learner take turns on one GPU, or weights travel from one GPU to another."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

VLLM = {"kind": "vllm", "dtype": "bfloat16", "max_model_len": 2048}
BF16 = {"dtype": "bfloat16", "gradient_checkpointing": True}
SHARED = {
    "engine": VLLM
    | {
        "num_gpus": 0.4,
        "sleep_while_learning": True,
        "args": {"enable_sleep_mode": True, "gpu_memory_utilization": 0.4},
    },
    "learner": BF16 | {"num_gpus": 0.6},
}
APART = {"engine": VLLM | {"num_gpus": 1}, "learner": BF16 | {"num_gpus": 1}}
DEFAULTS: dict[str, Any] = {"engine": {"max_model_len": 2048}, "learner": {}}
"""Settings that follow the hardware: shared on one GPU, apart on two."""
ON_CPU = {"engine": {"kind": "transformers"}, "learner": {}}


@pytest.mark.parametrize(
    ("shape", "device", "settings"),
    [
        pytest.param("tiny", "cpu", ON_CPU, id="tiny-cpu", marks=pytest.mark.slow),
        pytest.param("0.5B", "cuda", SHARED, id="0.5B-shared", marks=pytest.mark.gpu),
        pytest.param("1.5B", "cuda", SHARED, id="1.5B-shared", marks=pytest.mark.gpu),
        pytest.param("0.5B", "cuda", DEFAULTS, id="0.5B-defaults", marks=pytest.mark.gpu),
        pytest.param("0.5B", "cuda", APART, id="0.5B-apart", marks=pytest.mark.gpu(2)),
    ],
)
def test_a_run_keeps_engine_and_learner_in_step(
    shape: str,
    device: str,
    settings: dict[str, Any],
    tmp_path: Path,
    models: Callable[..., str],
    program: Callable[..., Any],
    figure: Callable[..., None],
) -> None:
    found = program(
        "run_program.py", model=models(shape, device), device=device, folder=str(tmp_path / "run"), **settings
    )
    rows = [row for row in found["rows"] if "learner/grad_norm" in row]
    assert [row["weights/version"] for row in rows] == [1, 2, 3]
    assert found["summary"]["rollouts_failed"] == found["summary"]["rollouts_lost"] == 0
    last = rows[-1]
    for name in ("time/rollout_s", "time/update_s", "time/sync_s"):
        figure(name, last[name], "s")
    figure("log-probs of engine and learner", last["mismatch/logprob_abs_mean"], "nats")
    figure("parity after the transfer", last["mismatch/probe_abs_mean"], "nats")
    limit = 1e-3 if device == "cpu" else 5e-2
    assert last["mismatch/logprob_abs_mean"] < limit
    assert last["mismatch/probe_abs_mean"] < limit
