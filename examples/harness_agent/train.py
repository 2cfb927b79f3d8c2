"""Train mini-swe-agent, an unmodified harness, to repair small Python modules: offline, on a CPU.

    pip install mini-swe-agent mcp
    python examples/harness_agent/train.py

The first run makes a small model from demonstrations. Each rollout starts `mini` in a new folder with a
broken module; after it has ended, tests run there and give the reward.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # the package `examples`, in a checkout

from agent import make_agent

import raylight as rl
from examples.starter_models.make import recipe_model
from examples.starter_models.tasks.repairs import repair_tasks

VALIDATION_TASKS = 128
"""Number of validation tasks. A rise of 0.2 is then more than three standard errors."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Train mini-swe-agent to repair small Python modules.")
    parser.add_argument(
        "--model", help="folder of a chat model; left out: a tiny one is made in the output directory"
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/harness_agent"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    args = parser.parse_args()
    tasks = repair_tasks(seed=1, count=1000)
    algorithm = rl.GRPO(
        model=args.model or recipe_model("harness:bash", args.output_dir / "initial", keep=True),
        n_steps=args.steps,
        tasks_per_step=4,
        group_size=8,
        lr=1e-6 if args.model else 5e-4,
        val_every=args.steps,
    )
    no_gpu: dict[str, Any] = {"num_gpus": 0} if args.cpu else {}
    trainer = rl.Trainer(
        algorithm=algorithm,
        engine=no_gpu,
        learner=no_gpu,
        n_runners=1,
        runner={"max_concurrent": 4},
        output_dir=args.output_dir,
        seed=args.seed,
    )
    trainer.fit(make_agent(), tasks[VALIDATION_TASKS:], val_dataset=tasks[:VALIDATION_TASKS])


if __name__ == "__main__":
    main()
