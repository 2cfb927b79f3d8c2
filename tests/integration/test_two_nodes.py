"""Runs on two nodes: roles on separate nodes, a node that is lost and replaced, one that joins later."""

from __future__ import annotations

from pathlib import Path

import pytest
from two_nodes import assert_survived_a_loss, run_on_two_nodes

ROLLOUTS_PER_STEP = 128


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
def test_a_run_learns_on_two_nodes_although_one_is_lost_and_replaced(tmp_path: Path) -> None:
    engine = {"kind": "transformers"}
    found = run_on_two_nodes("replace", folder=str(tmp_path), steps=10, lost_after=3, engine=engine)
    assert_survived_a_loss(found, steps=10)


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
def test_a_runner_on_a_node_that_joins_later_reaches_the_model(tmp_path: Path) -> None:
    found = run_on_two_nodes("grow", folder=str(tmp_path))
    assert found["summary"]["rollouts"] == 4
    assert found["summary"]["failed"] == 0
    assert found["url"].startswith(f"http://{found['head'].rpartition(':')[0]}:")


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
def test_a_node_that_drains_is_left_without_a_lost_rollout(tmp_path: Path) -> None:
    found = run_on_two_nodes("drain", folder=str(tmp_path), steps=12, drained_after=2)
    before, after = found["placements"]["1"], found["placements"]["12"]
    assert "other" in before["runner"]
    assert (after["runner"], after["learner"]) == (["head"] * 4, ["head"])
    assert {"other", "drained"}.isdisjoint(after["engine"])
    summary, counts = found["summary"], found["summary"]["counts"]
    assert (summary["rollouts_failed"], summary["rollouts_lost"], counts["runners_lost"]) == (0, 0, 0)
    assert summary["rollouts"] == counts["rollouts_succeeded"] == 12 * ROLLOUTS_PER_STEP
    assert counts["runners_replaced"] == before["runner"].count("other")


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
@pytest.mark.parametrize("deadline_s", [12.0, 0.0], ids=["deadline", "no deadline"])
def test_rollouts_that_outlast_a_drain_are_not_charged(deadline_s: float, tmp_path: Path) -> None:
    """They may fail once only, and the infrastructure too."""
    task = {"folder": str(tmp_path), "steps": 8, "drained_after": 2, "deadline_s": deadline_s}
    found = run_on_two_nodes("hold", **task)
    summary, counts = found["summary"], found["summary"]["counts"]
    assert found["held"] >= 8
    assert counts["attempts_failed_infrastructure"] == found["held"]
    assert (summary["rollouts_failed"], summary["rollouts_lost"], counts["runners_lost"]) == (0, 0, 0)
    assert summary["rollouts"] == 8 * ROLLOUTS_PER_STEP
    assert found["placements"]["8"]["runner"] == ["head"] * 4
    assert summary["tokens"]["unaccounted"] == 0


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
def test_a_learner_moves_from_a_node_that_drains(tmp_path: Path) -> None:
    """No step is taken twice, although no training state was due."""
    found = run_on_two_nodes("move", folder=str(tmp_path), steps=8, drained_after=2)
    assert found["placements"]["1"]["learner"] == ["other"]
    assert found["placements"]["8"]["learner"] == ["other"]
    summary = found["summary"]
    counts = summary["counts"]
    assert (counts["learner_moves"], counts["learner_restarts"]) == (1, 0)
    assert (summary["steps"], summary["rollouts_failed"], summary["rollouts_lost"]) == (8, 0, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("no_processes_left")
def test_the_node_with_gpus_is_asked_for_vllm() -> None:
    found = run_on_two_nodes("packages")
    assert list(found["answers"].values()) == [found["driver"]]
    assert found["kind"] == ("vllm" if found["driver"] else "transformers")
