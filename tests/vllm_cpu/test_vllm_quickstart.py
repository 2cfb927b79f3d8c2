"""`raylight quickstart --engine vllm`: a model learns through real vLLM on a CPU, in Ray Serve."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


@pytest.mark.timeout(400)
def test_the_agent_learns_through_vllm(tmp_path: Path) -> None:
    command = [
        str(BIN / "raylight"),
        "quickstart",
        "--engine",
        "vllm",
        "--output-dir",
        str(tmp_path),
        "--steps",
        "15",
    ]
    done = subprocess.run(
        command, env={**os.environ, "RAY_ADDRESS": "local"}, capture_output=True, text=True, timeout=380
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert '"levelname": "INFO"' not in done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reward_before"] <= 0.6
    assert summary["reward_after"] >= 0.85
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    learned = [row for row in rows if "learner/grad_norm" in row]
    assert len(learned) >= 12
    for row in learned:
        assert row["mismatch/logprob_abs_max"] < 1e-3
        assert row["mismatch/probe_abs_mean"] < 1e-3
    assert learned[-1]["weights/version"] == len(learned)
    assert sum(row["train/aborted"] for row in learned) == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_schema_bound_agent_learns_through_vllm(tmp_path: Path) -> None:
    """The reward rises from about 0.5, because the choices that the schema leaves are trained."""
    here = Path(__file__).parent
    paths = [str(here.parent / "helpers"), str(here.parent.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, str(here / "schema_training.py"), str(tmp_path)],
        env={**os.environ, "RAY_ADDRESS": "local", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["val/reward"] - rows[0]["val/reward"] >= 0.2
    learned = [row for row in rows if "learner/grad_norm" in row]
    assert len(learned) >= 8
    for row in learned:
        assert row["mismatch/logprob_abs_max"] < 1e-3
        assert row["constrained/tokens"] >= row["train/rollouts"]
        assert row["constrained/forced_fraction"] >= 0.5


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_adapter_learns_through_vllm(tmp_path: Path) -> None:
    """Probes and rollouts use the adapter's versions, and the engine's own weights stay as they are."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "lora_training.py"), str(tmp_path)],
        env={**os.environ, "RAY_ADDRESS": "local"},
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["val/reward"] - rows[0]["val/reward"] >= 0.2
    learned = [row for row in rows if "learner/grad_norm" in row]
    assert [row["weights/version"] for row in learned] == [1, 2, 3, 4, 5]
    for row in learned:
        assert row["mismatch/logprob_abs_max"] < 1e-3
        assert row["mismatch/probe_abs_mean"] < 1e-3
    assert (tmp_path / "checkpoint" / "adapter" / "adapter_config.json").exists()
