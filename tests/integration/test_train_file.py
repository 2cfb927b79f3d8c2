"""`raylight train`: a run from a file or for an agent, whose config.yaml starts the same run again."""

import inspect
import json
import subprocess
from pathlib import Path

import pytest
import yaml
from ray_cluster import BIN, Cluster

from raylight.quickstart import STARTER_MODEL
from raylight.quickstart import agent as quickstart_agent

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
        timeout=600,
        cwd=folder,
    )


def write_tasks(folder: Path) -> None:
    tasks = "".join(f'{{"a": {a}, "b": {a + 1}}}\n' for a in range(10, 20))
    (folder / "train.jsonl").write_text(tasks)


@pytest.mark.slow
@pytest.mark.timeout(1900)
def test_the_config_of_a_run_starts_the_same_run_again(cluster: Cluster, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    (tmp_path / "run.yaml").write_text(RUN.replace("MODEL", STARTER_MODEL))
    done = train(cluster, tmp_path, "run.yaml", "--set", "algorithm.n_steps=2")
    assert done.returncode == 0, done.stdout + done.stderr
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
@pytest.mark.timeout(1900)
def test_the_config_of_an_agents_run_resumes_it(cluster: Cluster, tmp_path: Path) -> None:
    write_tasks(tmp_path)
    package = tmp_path / "some agents" / "adding"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "agent.py").write_text("from .adders import adder as solver\n")
    (package / "adders.py").write_text(inspect.getsource(quickstart_agent))
    options = ["--model", STARTER_MODEL, "--data", "train.jsonl", "--steps", "2", "--output-dir", "first"]
    small = ["--n-runners", "1", "--set", "algorithm.tasks_per_step=2", "--set", "algorithm.group_size=4"]
    done = train(cluster, tmp_path, "some agents/adding/agent.py:solver", *options, *small)
    assert done.returncode == 0, done.stdout + done.stderr

    resumed = train(cluster, tmp_path, "first/config.yaml", "--resume", "--steps", "3")
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resuming after step 2" in resumed.stdout
    lines = (tmp_path / "first" / "metrics.jsonl").read_text().splitlines()
    # without validation tasks there is no row before the first step
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]
    cluster.assert_clean()
