"""`raylight quickstart --engine vllm`: a model learns through real vLLM on a CPU, in Ray Serve."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

import psutil
import pytest
from programs import run_python
from ray_cluster import eventually, kill_orphaned_proxies, ray_processes
from run_output import metric_rows
from vllm_helpers import run_program

BIN = Path(sys.executable).parent


@pytest.mark.timeout(900)
def test_the_agent_learns_through_vllm(tmp_path: Path) -> None:
    options = ["--engine", "vllm", "--output-dir", tmp_path, "--steps", 15]
    done = run_python(BIN / "raylight", "quickstart", *options, timeout_s=880)
    assert "Traceback" not in done.stdout + done.stderr
    assert '"levelname": "INFO"' not in done.stdout + done.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["reward_before"] <= 0.6
    assert summary["reward_after"] >= 0.85
    rows = metric_rows(tmp_path)
    learned = [row for row in rows if "learner/grad_norm" in row]
    assert len(learned) >= 12
    for row in learned:
        assert row["mismatch/logprob_abs_max"] < 1e-3
        assert row["mismatch/probe_abs_mean"] < 1e-3
    assert learned[-1]["weights/version"] == len(learned)
    assert sum(row["train/aborted"] for row in learned) == 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_schema_bound_agent_learns_through_vllm(tmp_path: Path) -> None:
    """The reward rises from about 0.5, because the choices that the schema leaves are trained."""
    run_program("schema_training.py", tmp_path)
    rows = metric_rows(tmp_path)
    assert rows[-1]["val/reward"] - rows[0]["val/reward"] >= 0.2
    learned = [row for row in rows if "learner/grad_norm" in row]
    assert len(learned) >= 8
    for row in learned:
        assert row["mismatch/logprob_abs_max"] < 1e-3
        assert row["constrained/tokens"] >= row["train/rollouts"]
        assert row["constrained/forced_fraction"] >= 0.5


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_adapter_learns_through_vllm(tmp_path: Path) -> None:
    """Probes and rollouts use the adapter's versions, and the engine's own weights stay as they are."""
    run_program("lora_training.py", tmp_path)
    rows = metric_rows(tmp_path)
    assert rows[-1]["val/reward"] - rows[0]["val/reward"] >= 0.2
    learned = [row for row in rows if "learner/grad_norm" in row]
    assert [row["weights/version"] for row in learned] == [1, 2, 3, 4, 5]
    for row in learned:
        assert row["mismatch/logprob_abs_max"] < 1e-3
        assert row["mismatch/probe_abs_mean"] < 1e-3
    assert (tmp_path / "checkpoint" / "adapter" / "adapter_config.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_several_models_learn_through_vllm_also_after_kills(tmp_path: Path) -> None:
    """A new replica serves the current adapters of all models; a new driver resumes the run."""
    program = str(Path(__file__).parent / "several_models_training.py")

    def start(log: IO[str]) -> subprocess.Popen:
        command = [sys.executable, program, str(tmp_path), "4"]
        environment = {**os.environ, "RAY_ADDRESS": "local"}
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)

    def rows() -> list[dict]:
        file = tmp_path / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def reach(run: subprocess.Popen, step: int) -> None:
        def reached() -> bool:
            assert run.poll() is None, (tmp_path / "log").read_text()
            return any(row["step"] >= step for row in rows())

        eventually(reached, 400, f"step {step}")

    proxies = ray_processes(("haproxy",))
    with (tmp_path / "log").open("w") as log:
        run = start(log)
        try:
            reach(run, 1)
            for process in psutil.Process(run.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if process.cmdline()[:1] and process.cmdline()[0].startswith("ray::ServeReplica"):
                        process.kill()
            reach(run, 3)
        finally:
            run.kill()
            run.wait()
        kill_orphaned_proxies(proxies)
        assert start(log).wait(400) == 0, (tmp_path / "log").read_text()
    found = rows()
    assert [row["step"] for row in found] == [1, 2, 3, 4]
    assert max(row["serving/outages"] for row in found) > 0
    for row in found:
        assert row["mismatch/logprob_abs_max"] < 1e-3
        for model in ("planner", "coder"):
            assert row[f"model/{model}/learner/grad_norm"] > 0
    last = found[-1]
    assert last["weights/version"] == 4
    assert last["ledger/unaccounted"] == last["ledger/model/judge/trained"] == 0
    folders = [tmp_path / "checkpoint" / model / "adapter" for model in ("planner", "coder")]
    assert len({(folder / "adapter_model.safetensors").read_bytes() for folder in folders}) == 2
