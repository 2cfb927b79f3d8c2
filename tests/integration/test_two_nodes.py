"""Runs on two nodes: roles on nodes of their own, a node that is lost and replaced, one that joins later."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray_cluster import restored_cluster_file

PROGRAM = Path(__file__).parents[1] / "helpers" / "two_node_run.py"
RUN_S = 280


def run(mode: str, **task: Any) -> dict[str, Any]:
    with restored_cluster_file():
        done = subprocess.run(
            [sys.executable, str(PROGRAM), mode, json.dumps(task)],
            capture_output=True,
            text=True,
            timeout=RUN_S,
        )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
def test_a_run_learns_on_two_nodes_although_one_is_lost_and_replaced(tmp_path: Path) -> None:
    engine = {"kind": "transformers"}
    found = run("replace", folder=str(tmp_path), steps=10, lost_after=3, engine=engine)
    summary, placements = found["summary"], found["placements"]
    assert summary["steps"] == 10
    assert summary["rollouts_failed"] == summary["rollouts_lost"] == 0
    assert summary["counts"]["rollouts_succeeded"] == summary["rollouts"]
    assert summary["reward_before"] <= 0.7
    assert summary["reward_after"] - summary["reward_before"] >= 0.15
    for step in ("1", "10"):
        assert placements[step]["learner"] == ["head", "head"]
        assert placements[step]["engine"] == ["other"]
        assert len(placements[step]["runner"]) == 4
    assert set(placements["1"]["runner"]) == {"head", "other"}
    assert summary["counts"]["runners_lost"] >= 1


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
def test_a_runner_on_a_node_that_joins_later_reaches_the_model(tmp_path: Path) -> None:
    found = run("grow", folder=str(tmp_path))
    assert found["summary"]["rollouts"] == 4
    assert found["summary"]["failed"] == 0
    assert found["url"].startswith(f"http://{found['head'].rpartition(':')[0]}:")


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
def test_the_node_with_gpus_is_asked_for_vllm() -> None:
    found = run("packages")
    assert list(found["answers"].values()) == [found["driver"]]
    assert found["kind"] == ("vllm" if found["driver"] else "transformers")
