"""Learning runs of documentation pages' agents: the reward on held-out tasks before and after training."""

import json
import math
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
        error: standard error of their difference.
        seconds: duration of the run, with its start.
        failures: errors of failed rollouts.
    """

    before: float
    after: float
    error: float
    seconds: float
    failures: list[str]

    @property
    def least_gain(self) -> float:
        """Difference of the rewards less two standard errors."""
        return self.after - self.before - 2 * self.error


def learn(
    agent: Any,
    model: str,
    folder: Path,
    steps: int,
    max_concurrent: int = 16,
    tasks: Any = None,
    tasks_per_step: int = 16,
) -> Learning:
    """Train an agent with the quickstart's settings, on the Ray cluster of RAY_ADDRESS.

    Args:
        folder: output folder of the run.
        max_concurrent: rollouts at once.
        tasks: training and validation tasks; by default the quickstart's additions.
        tasks_per_step: tasks of a step, with eight rollouts each.
    """
    train_tasks, val_tasks = tasks or additions(0)
    trainer = rl.Trainer(
        algorithm=rl.GRPO(
            model=model, n_steps=steps, lr=2e-4, tasks_per_step=tasks_per_step, val_every=steps, val_samples=2
        ),
        n_runners=1,
        runner={"max_concurrent": max_concurrent},
        output_dir=folder,
        progress=False,
        seed=0,
    )
    start = time.monotonic()
    trainer.fit(agent, train_tasks, val_dataset=val_tasks)
    seconds = time.monotonic() - start
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    measured = [row for row in rows if "val/reward" in row]
    learning = Learning(
        before=measured[0]["val/reward"],
        after=measured[-1]["val/reward"],
        error=math.hypot(*(measured[i]["val/reward_error"] for i in (0, -1))),
        seconds=seconds,
        failures=failures(rl.read_rollouts(folder)),
    )
    print(
        f"{steps} steps, {seconds:.0f} s: {learning.before:.3f} -> {learning.after:.3f}, "
        f"standard error of the difference {learning.error:.3f}"
    )
    return learning
