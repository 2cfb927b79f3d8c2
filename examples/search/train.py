"""Train a model to search for the answers to questions.

python examples/search/train.py                 a tiny model that is made here, on a CPU
python examples/search/train.py --model PATH    another model
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2]))  # the package `examples`, in a checkout

from agent import look_up
from corpus import make_facts
from demonstrations import searches

import raylight as rl
from examples.starter_models.make import recipe_model

TASKS_PER_STEP, VALIDATION_TASKS = 8, 64
TAUGHT_STEPS = 400


def make_tasks() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return tasks to train on, and others that validate."""
    tasks = [{"question": fact.question, "answer": fact.value} for fact in make_facts()]
    random.Random(0).shuffle(tasks)
    return tasks[VALIDATION_TASKS:], tasks[:VALIDATION_TASKS]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="folder of a chat model that calls tools; left out: a tiny one is made"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/search"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    args = parser.parse_args(arguments)
    model = args.model or recipe_model(
        searches, args.output_dir / "initial", steps=TAUGHT_STEPS, batch_tokens=2048, seed=args.seed
    )
    algorithm = rl.GRPO(
        model=model,
        n_steps=args.steps,
        tasks_per_step=TASKS_PER_STEP,
        group_size=8,
        lr=1e-6 if args.model else 5e-4,
        val_every=max(args.steps // 2, 1),
        val_samples=2,
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
    train, val = make_tasks()
    trainer.fit(look_up, train, val_dataset=val)


if __name__ == "__main__":
    main()
