"""Train a model to solve sums with a chain of thought.

python examples/gsm/train.py                                     a tiny model that is made here, on a CPU
python examples/gsm/train.py --model PATH --dataset gsm_symbolic     another model, grade-school sums in words
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # `examples`, in a checkout

from agent import solve
from demonstrations import SETTINGS, chains_of_thought

import raylight as rl
from examples.starter_models.make import recipe_model

TASKS_PER_STEP, VALIDATION_TASKS, VALIDATION_SEED = 8, 64, 500_000
SAMPLES = 4
"""Answers to each validation task, for pass@4."""
TAUGHT_STEPS = 1800


def make_tasks(dataset: str, count: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return tasks to train on, and others that validate."""
    settings = SETTINGS if dataset == "chain_sum" else {}
    val = list(rl.environments.ReasoningGym(dataset, VALIDATION_TASKS, VALIDATION_SEED, **settings))
    held_out = {task["question"] for task in val}
    train = rl.environments.ReasoningGym(dataset, count, count * seed, **settings)
    return [task for task in train if task["question"] not in held_out], val


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a chat model; left out: a tiny one is made")
    parser.add_argument("--dataset", default="chain_sum", help="dataset of reasoning-gym")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/gsm"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    args = parser.parse_args(arguments)
    train, val = make_tasks(args.dataset, 1000, args.seed)
    held_out = {task["question"] for task in val}  # which the tiny model is not taught
    model = args.model or recipe_model(
        chains_of_thought,
        args.output_dir / "initial",
        options={"held_out": held_out},
        steps=TAUGHT_STEPS,
        batch_tokens=1536,
        seed=args.seed,
    )
    algorithm = rl.GRPO(
        model=model,
        n_steps=args.steps,
        tasks_per_step=TASKS_PER_STEP,
        group_size=8,
        lr=1e-6 if args.model else 5e-4,
        val_every=max(args.steps // 2, 1),
        val_samples=SAMPLES,
    )
    no_gpu: dict[str, Any] = {"num_gpus": 0} if args.cpu else {}
    trainer = rl.Trainer(
        algorithm=algorithm,
        engine=no_gpu,
        learner=no_gpu,
        n_runners=1,
        output_dir=args.output_dir,
        seed=args.seed,
    )
    trainer.fit(solve, train, val_dataset=val)


if __name__ == "__main__":
    main()
