"""Learning runs of documentation pages' agents: the reward on held-out tasks before and after training."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from framework_agents import failures

import raylight as rl
from raylight.quickstart.additions import additions


@dataclass
class Learning:
    """Figures of a run.

    Attributes:
        before, after: mean validation reward.
        seconds: duration of the run, with its start.
        failures: errors of failed rollouts.
    """

    before: float
    after: float
    seconds: float
    failures: list[str]


def learn(
    agent: Any, model: str, folder: Path, steps: int, max_concurrent: int = 16, tasks: Any = None
) -> Learning:
    """Train an agent with the quickstart's settings, on the Ray cluster of RAY_ADDRESS.

    Args:
        folder: output folder of the run.
        max_concurrent: rollouts at once.
        tasks: training and validation tasks; by default the quickstart's additions.
    """
    train_tasks, val_tasks = tasks or additions(0)
    trainer = rl.Trainer(
        algorithm=rl.GRPO(model=model, n_steps=steps, lr=2e-4, val_every=steps, val_samples=2),
        n_runners=1,
        runner={"max_concurrent": max_concurrent},
        output_dir=folder,
        progress=False,
        seed=0,
    )
    start = time.monotonic()
    trainer.fit(agent, train_tasks, val_dataset=val_tasks)
    seconds = time.monotonic() - start
    summary = json.loads((folder / "summary.json").read_text())
    learning = Learning(
        summary["reward_before"], summary["reward_after"], seconds, failures(rl.read_rollouts(folder))
    )
    print(f"{steps} steps, {seconds:.0f} s: {learning.before:.3f} -> {learning.after:.3f}")
    return learning
