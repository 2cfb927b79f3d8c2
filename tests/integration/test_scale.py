"""`raylight scale` on a run that trains asynchronously."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray_cluster import BIN, Cluster
from run_output import metric_rows

import raylight as rl
from raylight.config import StoreConfig
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder
from raylight.store.actor import start_store
from raylight.store.client import StoreClient

DEADLINE_S = 150


@pytest.fixture(scope="module", autouse=True)
def connected(shared_cluster: Cluster) -> Iterator[None]:
    with shared_cluster.connected(Path(__file__).parent):
        yield


@rl.rollout
async def patient_adder(task: dict, llm: rl.LLM) -> float:
    """The quickstart's agent. As a validation task it gets better until a file exists."""
    if "end" in task:
        return _validation_reward(task["end"])
    return await adder(task, llm)


def _validation_reward(end: str) -> float:
    return 0.0 if os.path.exists(end) else time.monotonic()


class Scaling:
    """Scales a run back and forth when its first step is logged. It is a logger of the run.

    Args:
        end: file that is written at the end.
    """

    def __init__(self, cluster: Cluster, option: str, end: Path) -> None:
        self._cluster, self._option, self._end = cluster, option, end
        self.outputs: list[str] = []
        self.run = self.error = ""
        self.thread = threading.Thread(target=self._scale)

    def start(self, config: dict[str, Any]) -> None:
        """Do nothing; the run is not up."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Begin."""
        if step == 1:
            self.thread.start()

    def finish(self) -> None:
        """Do nothing."""

    def _scale(self) -> None:
        actors = ray.util.list_named_actors(all_namespaces=True)
        (self.run,) = (actor["namespace"] for actor in actors if actor["name"] == "runner-0")
        unknown = self._begin("nowhere", 2)
        try:
            for size in (2, 1):
                self.outputs.append(self._begin(self.run, size).communicate(timeout=DEADLINE_S)[0])
        finally:
            self._end.touch()
        self.error = unknown.communicate(timeout=DEADLINE_S)[1]

    def _begin(self, run: str, size: int) -> subprocess.Popen[str]:
        command = [str(BIN / "raylight"), "scale", run, f"--{self._option}", str(size)]
        return subprocess.Popen(
            command, env=self._cluster.env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )


@pytest.mark.slow
@pytest.mark.parametrize(("option", "own_store"), [("runners", True), ("replicas", True), ("runners", False)])
def test_a_run_is_scaled_up_and_back(
    option: str, own_store: bool, shared_cluster: Cluster, tmp_path: Path
) -> None:
    """No rollout fails, and none is executed twice."""
    folder = tmp_path / "run"
    folder.mkdir()
    actor = None if own_store else start_store("mine", str(folder / "store.db"), StoreConfig())
    scaling = Scaling(shared_cluster, option, tmp_path / "end")
    store = None if actor is None else rl.StoreClient(actor)
    rows = train_until(tmp_path / "end", folder, scaling, store=store)
    scaling.thread.join(DEADLINE_S)
    if actor is not None:
        ray.get(actor.close.remote())
        ray.kill(actor)
    assert scaling.outputs == [f"{option}: 1 -> 2\n", f"{option}: 2 -> 1\n"]
    assert "no run 'nowhere'" in scaling.error
    assert f"it has: {scaling.run}" in scaling.error
    sizes = [row["runners/n" if option == "runners" else "serving/replicas"] for row in rows]
    assert (sizes[0], max(sizes), sizes[-1]) == (1, 2, 1)
    statuses, attempts = asyncio.run(_rollouts(folder))
    assert statuses.keys() <= {"succeeded", "cancelled"}, "those in progress at the end are cancelled"
    assert attempts <= {1}


class Growth:
    """Ends a run some steps after a replica was added. It is a logger of the run.

    Args:
        end: file that is written at the end.
    """

    def __init__(self, end: Path) -> None:
        self._end = end
        self._grown = 0

    def start(self, config: dict[str, Any]) -> None:
        """Do nothing; the run is not up."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Count the steps with two replicas."""
        self._grown += metrics["serving/replicas"] == 2
        if self._grown == 5:
            self._end.touch()

    def finish(self) -> None:
        """Do nothing."""


@pytest.mark.slow
def test_serve_adds_a_replica_under_load(shared_cluster: Cluster, tmp_path: Path) -> None:
    """It has the current weights before it serves: each publication compares log-probs with all replicas."""
    folder, end = tmp_path / "run", tmp_path / "end"
    folder.mkdir()
    engine = {"max_replicas": 2, "target_ongoing_requests": 0.2}
    rows = train_until(end, folder, Growth(end), engine=engine)
    assert (rows[0]["serving/replicas"], rows[-1]["serving/replicas"]) == (1, 2)


def train_until(end: Path, folder: Path, logger: Any, **settings: Any) -> list[dict[str, Any]]:
    """Train asynchronously until a file exists, and return the metrics of the steps. No rollout fails."""
    algorithm = rl.GRPO(
        model=STARTER_MODEL,
        group_size=2,
        tasks_per_step=4,
        n_steps=1000,
        max_steps_without_signal=1000,
        max_staleness=1,
        val_every=3,
        patience=1,
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        n_runners=1,
        output_dir=folder,
        loggers=["jsonl", logger],
        progress=False,
        **settings,
    )
    summary = trainer.fit(patient_adder, additions(0)[0], [{"end": str(end)}])
    assert summary["tokens"]["failed"] == 0
    rows = metric_rows(folder)
    assert all(row["ledger/unaccounted"] == 0 for row in rows)
    return rows


async def _rollouts(folder: Path) -> tuple[Counter[str], set[int]]:
    """Return the number of rollouts of each status, and the numbers of attempts of the decided ones."""
    service = rl.StoreService(folder / "store.db", read_only=True)
    try:
        rollouts = await StoreClient(service).query_rollouts()
    finally:
        await service.close()
    attempts = {rollout.attempt.sequence_id for rollout in rollouts if rollout.attempt is not None}
    return Counter(rollout.status for rollout in rollouts), attempts
