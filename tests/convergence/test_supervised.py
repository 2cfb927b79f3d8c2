"""Supervised fine-tuning and preferences lift a small model, and reinforcement learning goes on from there.

Every bound on a gain is about half of the one that was measured.
"""

import json
from pathlib import Path
from typing import Any

import pytest

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, question
from raylight.quickstart.agent import adder

TRAIN, VAL = additions(0)


def demonstration(task: dict[str, int]) -> dict[str, Any]:
    answer = {"role": "assistant", "content": str(task["a"] + task["b"])}
    return {"messages": [{"role": "user", "content": question(task)}, answer]}


def fit(algorithm: Any, folder: Path, *data: Any, **settings: Any) -> list[dict[str, Any]]:
    """Train, and return the metrics by step."""
    rl.Trainer(algorithm=algorithm, output_dir=folder, progress=False, **settings).fit(*data)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def score(model: str | Path, folder: Path) -> float:
    """Return the mean reward of a model that samples at temperature 1."""
    trainer = rl.Trainer(output_dir=folder, progress=False, n_runners=2)
    return trainer.evaluate(adder, VAL, model=str(model), samples=4)["rewards"]["reward"]["mean"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_sft_from_demonstrations_then_grpo(cluster: Any, tmp_path: Path) -> None:
    sft = rl.SFT(
        model=STARTER_MODEL,
        data=[demonstration(task) for task in TRAIN[:512]],
        val_data=[demonstration(task) for task in VAL],
        lr=3e-4,
        n_epochs=4,
    )
    rows = fit(sft, tmp_path / "sft")
    before, warm = (
        score(STARTER_MODEL, tmp_path / "x"),
        score(tmp_path / "sft" / "checkpoint", tmp_path / "y"),
    )
    grpo = rl.GRPO(
        model=str(tmp_path / "sft" / "checkpoint"),
        n_steps=8,
        lr=2e-4,
        mini_batches=2,
        val_every=0,
        val_samples=4,
    )
    after = fit(grpo, tmp_path / "grpo", adder, TRAIN, VAL, n_runners=2)
    print(
        "SFT",
        before,
        warm,
        after[0]["val/reward"],
        after[-1]["val/reward"],
        rows[0]["val/loss"],
        rows[-1]["val/loss"],
    )
    assert rows[-1]["val/loss"] < rows[0]["val/loss"]
    assert warm > before + 0.05
    assert after[-1]["val/reward"] > warm + 0.05


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_rollouts_of_a_run_teach_by_preference_and_by_imitation(cluster: Any, tmp_path: Path) -> None:
    sampling = rl.GRPO(model=STARTER_MODEL, n_steps=6, lr=1e-9, val_every=None, val_before_train=False)
    fit(sampling, tmp_path / "run", adder, TRAIN, n_runners=2)
    before = score(STARTER_MODEL, tmp_path / "x")
    dpo = rl.DPO(
        model=STARTER_MODEL,
        data=tmp_path / "run",
        val_data=tmp_path / "run",
        lr=1e-4,
        n_epochs=3,
        batch_size=16,
    )
    rows = fit(dpo, tmp_path / "dpo")
    preferred = score(tmp_path / "dpo" / "checkpoint", tmp_path / "y")
    sft = rl.SFT(model=STARTER_MODEL, data=tmp_path / "run", min_reward=1.0, lr=3e-4, n_epochs=3)
    fit(sft, tmp_path / "sft")
    imitated = score(tmp_path / "sft" / "checkpoint", tmp_path / "z")
    print("DPO", before, preferred, imitated, rows[0], rows[-1])
    assert rows[-1]["val/accuracy"] > rows[0]["val/accuracy"] + 0.2
    assert rows[-1]["val/margin"] > rows[0]["val/margin"] + 0.1
    assert preferred > before + 0.03
    assert imitated > before + 0.03
