"""`raylight train`: a run from a file, whose config.yaml starts the same run again."""

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from ray_cluster import BIN, Cluster

RUN = """
agent: raylight.quickstart.agent:adder
data: {train: train.jsonl, val: raylight.quickstart.additions:validation_tasks}
algorithm:
  {name: GRPO, model: MODEL, n_steps: 9, tasks_per_step: 2, group_size: 4, val_every: null, lr: 2.0e-4}
runner: {n: 1}
output_dir: first
"""


def train(cluster: Cluster, folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [str(BIN / "raylight"), "train", *arguments],
        env=cluster.env(),
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
    )


def start(cluster: Cluster, folder: Path) -> None:
    """Run two steps from a file, into the folder `first`."""
    from raylight.quickstart import STARTER_MODEL

    (folder / "run.yaml").write_text(RUN.replace("MODEL", STARTER_MODEL))
    tasks = "".join(f'{{"a": {a}, "b": {a + 1}}}\n' for a in range(10, 20))
    (folder / "train.jsonl").write_text(tasks)
    done = train(cluster, folder, "run.yaml", "--set", "algorithm.n_steps=2")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_config_of_a_run_starts_the_same_run_again(cluster: Cluster, tmp_path: Path) -> None:
    start(cluster, tmp_path)
    written = yaml.safe_load((tmp_path / "first" / "config.yaml").read_text())
    assert written["data"]["train"] == str(tmp_path / "train.jsonl")
    assert written["run"]["total_steps"] == 2

    again = train(cluster, tmp_path, "first/config.yaml", "--set", "output_dir=second")
    assert again.returncode == 0, again.stdout + again.stderr
    repeated = yaml.safe_load((tmp_path / "second" / "config.yaml").read_text())
    changed = {"output_dir", "run"}
    assert {k: v for k, v in repeated.items() if k not in changed} == {
        k: v for k, v in written.items() if k not in changed
    }
    for folder in ("first", "second"):
        lines = (tmp_path / folder / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [0, 1, 2]

    wrong = train(cluster, tmp_path, "run.yaml", "--set", "algorithm.lrr=1")
    assert wrong.returncode == 1
    assert "takes no 'lrr'; it has: lr" in wrong.stderr
    cluster.assert_clean()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_from_a_file_resumes(cluster: Cluster, tmp_path: Path) -> None:
    start(cluster, tmp_path)
    resumed = train(cluster, tmp_path, "first/config.yaml", "--resume", "--set", "algorithm.n_steps=3")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resuming after step 2" in resumed.stdout
    lines = (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 1, 2, 3]
    cluster.assert_clean()
