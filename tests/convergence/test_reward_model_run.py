"""A policy learns from a reward model that the run serves, which was itself trained on pairs of answers."""

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from reward_models import build_reward_model, teach_digit
from run_output import metric_rows

import raylight as rl
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions, question
from raylight.quickstart.agent import SAMPLING
from raylight.trainer.components.reward_models import ServedRewardModel

TRAIN, VAL = additions(0)
KILLED_AT = 100
"""The replica is killed before this group's score: 64 belong to the first evaluation, 16 to each step."""


@rl.rollout
async def answerer(task: dict, llm: rl.LLM) -> dict[str, float]:
    """Answer as the quickstart's agent does; 1 for a 7 is shown, and not learned from."""
    reply = await llm.client().chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": question(task)}],
        **SAMPLING | llm.sampling_parameters,
    )
    return {"seven": float("7" in (reply.choices[0].message.content or ""))}


def fit(folder: Path, model: str, n_steps: int, **arguments: Any) -> list[dict]:
    algorithm = rl.GRPO(
        model=STARTER_MODEL, n_steps=n_steps, lr=2e-4, mini_batches=2, val_every=4, val_samples=2
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        n_runners=2,
        output_dir=folder,
        progress=False,
        group_reward=rl.rewards.reward_model(model, name="taste", num_cpus=0.25),
        checkpoint={"every": 2},
    )
    trainer.fit(answerer, TRAIN, VAL[:64], **arguments)
    return metric_rows(folder)


def kill_replica(folder: Path) -> None:
    """Kill the process of the only replica of a run's reward model."""
    run = yaml.safe_load((folder / "config.yaml").read_text())["run"]["name"]
    (found,) = (
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if any(f"ServeReplica:{run}-reward-model:" in part for part in process.info["cmdline"] or ())
    )
    os.kill(found, signal.SIGKILL)


@pytest.mark.slow
def test_a_policy_learns_from_a_reward_model_whose_replica_dies(tmp_path: Path) -> None:
    model = build_reward_model(tmp_path / "reward")
    accuracy = teach_digit(model, steps=40)
    assert accuracy >= 0.9
    score, calls = ServedRewardModel.score, list[int]()

    async def score_and_kill(
        self: ServedRewardModel, conversations: list[rl.rewards.RewardModelInput]
    ) -> Any:
        calls.append(len(conversations))
        if len(calls) == KILLED_AT:
            kill_replica(tmp_path / "run")
        return await score(self, conversations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ServedRewardModel, "score", score_and_kill)
        rows = fit(tmp_path / "run", model, 4)
    assert len(calls) > KILLED_AT
    rows = fit(tmp_path / "run", model, 8, resume=True)
    steps = [row for row in rows if row["step"]]
    assert [row["step"] for row in steps] == list(range(1, 9))
    for row in steps:
        assert row["train/grades_failed"] == row["train/failed"] == row["train/aborted"] == 0
    gained = {name: rows[-1][name] - rows[0][name] for name in ("val/reward", "val/reward/seven")}
    print(f"the reward model ranks {accuracy:.3f} of new pairs; gains {gained}")
    assert gained["val/reward"] > 0
    assert gained["val/reward/seven"] >= 0.15
