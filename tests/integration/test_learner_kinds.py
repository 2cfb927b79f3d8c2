"""Runs with a local and with a simulated learner: the same loop, states and versions as with ranks."""

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from run_output import metric_rows
from safetensors.numpy import load_file

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.types import FinishedRollout

pytestmark = pytest.mark.usefixtures("connected_on_one_thread")


def fit(folder: Path, n_steps: int, learner: dict[str, Any], resume: Any = False, **settings: Any) -> dict:
    algorithm = rl.algorithms.RLOO(
        model=STARTER_MODEL, lr=2e-3, n_steps=n_steps, tasks_per_step=4, group_size=4, val_every=2, **settings
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        learner=learner,
        engine={"max_model_len": 64, "args": {"max_new_tokens": 8}},
        checkpoint={"every": 1},
        output_dir=folder,
        progress=False,
    )
    train, val = additions(0)
    return trainer.fit(adder, train, val_dataset=val[:8], resume=resume)


async def training_rollouts(path: Path) -> list[FinishedRollout]:
    store = StoreClient(StoreService(path, read_only=True))
    rollouts = await store.query_rollouts()
    return await store.collect([rollout.rollout_id for rollout in rollouts if rollout.mode == "train"])


@pytest.mark.slow
def test_any_algorithm_trains_locally_and_resumes(tmp_path: Path) -> None:
    learner = {"kind": "local", "lora": {"rank": 4}}
    fit(tmp_path, 2, learner, kl_reward_coef=1e-3)
    first = load_file(tmp_path / "checkpoint" / "adapter" / "adapter_model.safetensors")
    assert (tmp_path / "best" / "config.json").exists()
    summary = fit(tmp_path, 4, learner, resume=True, kl_reward_coef=1e-3)
    assert summary["steps"] == 4
    rows = metric_rows(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    updates = [row for row in rows[1:] if row["train/groups_without_signal"] < 4]
    assert [row["weights/version"] for row in updates] == [*range(1, len(updates) + 1)]
    assert all(row["mismatch/logprob_abs_max"] < 1e-3 for row in updates)
    last = load_file(tmp_path / "checkpoint" / "adapter" / "adapter_model.safetensors")
    assert any(not np.array_equal(first[name], last[name]) for name in first)
    with sqlite3.connect(tmp_path / "store.db") as store:
        assert store.execute("select count(*) from rollouts where mode = 'train'").fetchone()[0] == 4 * 16


@pytest.mark.slow
def test_rollouts_go_on_beside_updates_of_a_local_learner(tmp_path: Path) -> None:
    fit(tmp_path, 3, {"kind": "local", "lora": {"rank": 4}}, max_staleness=2)
    rows = metric_rows(tmp_path)[1:]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert 1 <= max(row["async/staleness_max"] for row in rows) <= 2
    assert all(row["async/engine_idle_s"] >= 0 for row in rows)
    assert all(row["async/publish_lag"] <= 1 for row in rows)
    assert rows[-1]["weights/version"] == 3


@pytest.mark.slow
def test_a_simulated_learner_gives_tokens_new_versions_and_resumes(tmp_path: Path) -> None:
    learner = {"kind": "simulated", "step_s": 0.05, "sync_s": 0.01}
    fit(tmp_path, 2, learner, max_staleness=1)
    fit(tmp_path, 3, learner, resume=True, max_staleness=1)
    rows = metric_rows(tmp_path)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert [row["weights/version"] for row in rows[1:]] == [1, 2, 3]
    assert all(row["learner/update_s"] >= 0.05 for row in rows[1:])
    assert all(row["async/staleness_max"] <= 1 and row["async/publish_lag"] <= 1 for row in rows[1:])
    assert not any("mismatch/probe_abs_mean" in row for row in rows)
    assert list((tmp_path / "checkpoint").iterdir()) == []
    trained = asyncio.run(training_rollouts(tmp_path / "store.db"))
    versions = {v for item in trained for call in item.generations for v in call.weight_versions}
    assert {0, 2} <= versions <= {0, 1, 2}
