"""Learner and vLLM share a GPU that Ray only counts: what a run on one GPU places, starts and publishes."""

import json
from pathlib import Path
from typing import Any

import pytest
from run_output import metric_rows
from vllm_helpers import run_program

SLEEPS = {"sleep_while_learning": True, "args": {"enable_sleep_mode": False}}
"""Engines are told to sleep, and say why they cannot: vLLM on a CPU refuses its own argument for it."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("algorithm", "engine", "learner"),
    [
        ({}, SLEEPS, {}),
        ({"max_staleness": 1}, {}, {}),
        ({}, SLEEPS, {"lora": {"rank": 4, "alpha": 8}}),
        ({}, SLEEPS, {"param_offload": True, "optimizer_offload": True}),
    ],
    ids=["synchronous", "asynchronous", "adapter", "offloaded"],
)
def test_a_run_on_one_gpu(
    algorithm: dict[str, Any], engine: dict[str, Any], learner: dict[str, Any], tmp_path: Path
) -> None:
    options = {"algorithm": algorithm, "engine": engine | {"weight_transfer": "gloo"}, "learner": learner}
    done = run_program("shared_gpu_training.py", tmp_path, json.dumps(options), RAY_ADDRESS="")
    rows = metric_rows(tmp_path)
    steps = [row for row in rows if row["step"]]
    assert [row["weights/version"] for row in steps] == [1, 2, 3]
    measured = [row for row in steps if "mismatch/logprob_abs_max" in row]  # not if all tokens are stale
    assert measured
    assert max(row["mismatch/logprob_abs_max"] for row in measured) < 1e-3
    assert max(row["mismatch/probe_abs_mean"] for row in steps) < 1e-3
    if engine.get("sleep_while_learning"):
        assert "cannot sleep: vLLM on a CPU has no device memory" in done.stdout + done.stderr
