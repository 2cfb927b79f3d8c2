"""Evaluations during training, with real learners, two engines that serve an adapter, and runners."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
import ray
from ray.util.state import list_actors
from run_output import metric_rows

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder
from raylight.trainer.output.run_records import read_rollouts

STEPS, EVERY = 8, 4

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("connected")]


@rl.rollout
async def slow_in_validation(task: dict, llm: rl.LLM, rollout: rl.Rollout) -> float:
    """The quickstart's agent, which answers several times in an evaluation."""
    rewards = []
    for _ in range(4 if rollout.mode == "val" else 1):
        rewards.append(await adder(task, llm))
        await asyncio.sleep(1.5 if rollout.mode == "val" else 0)
    return sum(rewards) / len(rewards)


class ReplicaKiller:
    """A metric logger that kills an engine replica once, after a step."""

    def __init__(self, step: int) -> None:
        self.step, self.killed = step, 0

    def start(self, config: dict) -> None: ...

    def log(self, step: int, metrics: dict) -> None:
        if step == self.step and not self.killed:
            address = ray.get_runtime_context().gcs_address  # not the machine's newest cluster
            alive = list_actors(address, filters=[("state", "=", "ALIVE")], detail=True, limit=1000)
            replicas = [actor.pid for actor in alive if "ServeReplica" in actor.class_name]
            self.killed = max(replicas)
            os.kill(self.killed, signal.SIGKILL)

    def finish(self) -> None: ...


@pytest.mark.parametrize("killed", [False, True])
def test_updates_go_on_beside_evaluations_of_one_version(killed: bool, tmp_path: Path) -> None:
    """A replica that takes the place of a killed one serves the evaluated version too."""
    train, val = additions(0)
    algorithm = rl.GRPO(
        model=STARTER_MODEL,
        group_size=4,
        tasks_per_step=4,
        n_steps=STEPS,
        val_every=EVERY,
        lr=2e-3,
        max_staleness=2,
    )
    killer = ReplicaKiller(EVERY)
    trainer = rl.Trainer(
        algorithm=algorithm,
        engine={"replicas": 2},
        learner={"lora": {"rank": 8}},
        n_runners=1,
        output_dir=tmp_path,
        progress=False,
        loggers=["jsonl", killer] if killed else ["jsonl"],
    )
    summary = trainer.fit(slow_in_validation, train, val[:6])
    rows = metric_rows(tmp_path)
    steps = [row for row in rows if "val/step" not in row]
    assert [row["step"] for row in steps] == list(range(STEPS + 1))
    assert bool(killer.killed) == killed
    evaluations = {row["val/step"]: row for row in rows if "val/step" in row}
    assert sorted(evaluations) == [0, EVERY, STEPS]
    overlapped = [evaluations[step]["step"] - step for step in (0, EVERY)]
    assert min(overlapped) >= 1, "updates went on"
    assert evaluations[EVERY]["val/failed"] == 0
    versions = {row["step"]: row["weights/version"] for row in steps[1:]} | {0: 0}
    finished = [item for item in read_rollouts(tmp_path) if item.rollout.mode == "val"]
    assert len(finished) == 3 * 6
    for item in finished:
        step = int(item.rollout.rollout_id.split("-")[2])
        sampled = {version for call in item.generations for version in call.weight_versions.tolist()}
        assert sampled == {versions[step]}
    assert summary["reward"] == "val/reward"
    best = json.loads((tmp_path / "best" / "best.json").read_text())
    assert best["value"] == max(row["val/reward"] for row in evaluations.values())
    assert (tmp_path / "best" / "adapter").is_dir()
