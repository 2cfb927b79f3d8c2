"""Train mini-swe-agent, an unmodified harness, to repair small Python modules: offline, on a CPU.

    pip install mini-swe-agent mcp
    python examples/harness_agent/train.py

The first run makes a small model from demonstrations. Each rollout starts `mini` in a folder of its own with
a broken module; after it has ended, tests enter that folder and are the reward.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import raylight as rl
from examples.starter_models.make import recipe_model
from examples.starter_models.tasks.repairs import repair_tasks

FOLDER = Path(__file__).resolve().parent
COMMAND = ["mini", "-c", str(FOLDER / "mini.yaml"), "-c", "{home}/mini.yaml", "-o", "{home}/trajectory.json"]
"""The preset's command with a shorter prompt."""
CLIENT = {"PYTHONPATH": str(FOLDER / "client")}
"""Variables of the harness, with which it finds the class of its model."""
VALIDATION_TASKS = 128
"""Number of validation tasks. A rise of 0.2 is then more than three standard errors."""


def tests_of(task: dict[str, Any]) -> dict[str, str]:
    return task["tests"]


def make_agent() -> rl.CommandAgent:
    """Return the harness, judged by the tests of a task."""
    return rl.CommandAgent(
        COMMAND,
        preset="mini-swe-agent",
        reward=rl.harnesses.RewardCommand(["python3", "check.py"], files=tests_of, timeout_s=30),
        timeout_s=300,
        scores_failures=True,
        max_output_tokens=64,
        env=CLIENT,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Train mini-swe-agent to repair small Python modules.")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--model", type=Path, default=Path("outputs/harness_starter"))
    parser.add_argument("--output-dir", default="outputs/harness_agent")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tasks = repair_tasks(seed=1, count=1000)
    algorithm = rl.GRPO(
        model=recipe_model("harness:bash", args.model, keep=True),
        n_steps=args.steps,
        tasks_per_step=4,
        group_size=8,
        lr=5e-4,
        val_every=args.steps,
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        n_runners=1,
        runner={"max_concurrent": 4},
        output_dir=args.output_dir,
        seed=args.seed,
    )
    trainer.fit(make_agent(), tasks[VALIDATION_TASKS:], val_dataset=tasks[:VALIDATION_TASKS])


if __name__ == "__main__":
    main()
