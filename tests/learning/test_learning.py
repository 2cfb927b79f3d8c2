"""Models learn: the real Trainer with Ray, Serve, the transformers engine and verl's learners, seeded, on a CPU.

Every bound on a gain is about half of the least gain of three seeds, as told beside it.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.quickstart.agent import adder

TRAIN, VAL = additions(0)
STEPS = 8
COMMON: dict[str, Any] = {"n_steps": STEPS, "lr": 2e-4, "mini_batches": 2, "val_every": 0, "val_samples": 2}


def fit(algorithm: rl.PolicyAlgorithm, folder: Path, agent: Any = adder, data: Any = (TRAIN, VAL), **settings: Any) -> list[dict]:
    """Train, check what holds for every run, and return its metrics by step."""
    trainer = rl.Trainer(algorithm=algorithm, n_runners=2, output_dir=folder, progress=False, **settings)
    summary = trainer.fit(agent, data[0], val_dataset=data[1])
    assert summary["steps"] == algorithm.n_steps
    assert summary["rollouts_lost"] == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    learned = [row for row in rows if "learner/grad_norm" in row]
    assert len(learned) == algorithm.n_steps
    for row in learned:
        assert row["mismatch/logprob_abs_max"] < 1e-3
        assert row["mismatch/probe_abs_mean"] < 1e-3
        assert row["train/failed"] == row["train/aborted"] == row["trace/drifts_response"] == 0
    return rows


def gain(rows: list[dict]) -> float:
    """Of the reward on tasks that are never trained on."""
    return rows[-1]["val/reward"] - rows[0]["val/reward"]


def test_lora(tmp_path: Path) -> None:
    rows = fit(rl.GRPO(model=STARTER_MODEL, **COMMON | {"lr": 1e-3}), tmp_path, learner={"lora": {"rank": 8}})
    assert gain(rows) >= 0.2
    assert (tmp_path / "checkpoint" / "adapter" / "adapter_config.json").is_file()


@pytest.mark.slow
def test_two_ranks(tmp_path: Path) -> None:
    rows = fit(rl.GRPO(model=STARTER_MODEL, **COMMON), tmp_path, learner={"n": 2})
    assert gain(rows) >= 0.2


@pytest.mark.slow
def test_ppo_with_a_critic(tmp_path: Path) -> None:
    rows = fit(rl.PPO(model=STARTER_MODEL, tasks_per_step=128, critic={"lr": 1e-3}, **COMMON), tmp_path)
    assert gain(rows) >= 0.2
    assert rows[-1]["critic/vf_loss"] < 0.5 * rows[1]["critic/vf_loss"]
    assert abs(rows[-1]["critic/vpred_mean"] - rows[-1]["train/reward"]) < 0.25  # it began at 0


@pytest.mark.slow
def test_rloo(tmp_path: Path) -> None:
    rows = fit(rl.RLOO(model=STARTER_MODEL, **COMMON), tmp_path)
    assert gain(rows) >= 0.2
