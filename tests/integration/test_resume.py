"""Resume after a kill of the driver or the learners: nothing is trained twice, nothing finished is lost."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from ray_cluster import eventually

SCRIPT = Path(__file__).parent / "resumed_run.py"
STEPS = 8
ROLLOUTS = 32
LOCAL = {**os.environ, "RAY_ADDRESS": "local"}


def start_run(
    folder: Path, learners: int = 1, resume: str = "auto", trained: str = "full"
) -> subprocess.Popen:
    folder.mkdir(exist_ok=True)
    with (folder / "log").open("a") as log:
        command = [sys.executable, str(SCRIPT), str(folder), str(STEPS), str(learners), resume, trained]
        return subprocess.Popen(command, env=LOCAL, stdout=log, stderr=subprocess.STDOUT)


def read_metrics(folder: Path) -> list[dict]:
    file = folder / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def wait_for_step(run: subprocess.Popen, folder: Path, step: int) -> None:
    def reached() -> bool:
        assert run.poll() is None, (folder / "log").read_text()
        return any(row["step"] >= step for row in read_metrics(folder))

    eventually(reached, 240, f"step {step}")


def read_rollouts(folder: Path) -> list[tuple[str, str, int, float]]:
    """Return name, status, number of attempts and end time of the training rollouts."""
    with sqlite3.connect(f"file:{folder}/store.db?mode=ro", uri=True) as db:
        return db.execute(
            "SELECT rollout_id, status, n_attempts, end_time FROM rollouts WHERE mode = 'train'"
        ).fetchall()


def finish(run: subprocess.Popen, folder: Path) -> dict:
    assert run.wait(200) == 0, (folder / "log").read_text()
    return json.loads((folder / "summary.json").read_text())


def learner_processes(run: subprocess.Popen) -> list[psutil.Process]:
    inside = psutil.Process(run.pid).children(recursive=True)
    return [process for process in inside if "LearnerActor" in " ".join(process.cmdline()[:1])]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_resumes_after_its_driver_was_killed(tmp_path: Path, kill_leftover_proxies: None) -> None:
    run = start_run(tmp_path)
    wait_for_step(run, tmp_path, 5)
    run.send_signal(signal.SIGKILL)
    run.wait()
    before = {name: end for name, status, _, end in read_rollouts(tmp_path) if status == "succeeded"}
    assert len(before) >= 5 * ROLLOUTS
    rewards = {row["step"]: row["train/reward"] for row in read_metrics(tmp_path) if "train/reward" in row}

    summary = finish(start_run(tmp_path, learners=2), tmp_path)
    after = read_rollouts(tmp_path)
    assert len(after) == STEPS * ROLLOUTS  # as many as without the kill: no finished rollout was repeated
    assert {
        name: end for name, _, _, end in after if name in before
    } == before  # finished rollouts were reused unchanged
    assert {status for _, status, _, _ in after} == {"succeeded"}
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert {row["step"]: row["train/reward"] for row in rows if row["step"] in rewards} == rewards
    versions = [row["weights/version"] for row in rows if "weights/version" in row]
    assert versions == sorted(set(versions))
    assert all(row["mismatch/logprob_abs_max"] < 1e-3 for row in rows if "mismatch/logprob_abs_max" in row)
    assert summary["steps"] == STEPS
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["step-6", "step-8"]
    assert (tmp_path / "checkpoint" / "config.json").exists()

    again = finish(start_run(tmp_path, resume="yes"), tmp_path)  # the run is finished: nothing is left to do
    assert (again["steps"], len(read_rollouts(tmp_path))) == (STEPS, STEPS * ROLLOUTS)


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("trained", ["full", "lora"])
def test_a_run_continues_after_a_learner_was_killed(
    trained: str, tmp_path: Path, no_processes_left: None
) -> None:
    run = start_run(tmp_path, learners=2, resume="no", trained=trained)
    wait_for_step(run, tmp_path, 4)
    learner_processes(run)[-1].kill()
    summary = finish(run, tmp_path)
    assert summary["steps"] == STEPS
    assert summary["counts"]["learner_restarts"] == 1
    after = read_rollouts(tmp_path)
    assert len(after) == STEPS * ROLLOUTS
    assert {attempts for _, _, attempts, _ in after} == {1}
    rows = read_metrics(tmp_path)
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert rows[-1]["learner/restarts"] == 1
    assert (tmp_path / "checkpoint" / "adapter").exists() == (trained == "lora")
    versions = [row["weights/version"] for row in rows if "weights/version" in row]
    assert versions == sorted(set(versions))
