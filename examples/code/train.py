"""Train a model to write Python functions that pass hidden tests, which run in a sandbox.

python examples/code/train.py                 a model that is made here, on a CPU
python examples/code/train.py --model PATH    another model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))

from agent import HAS_BUBBLEWRAP, write_function
from functions import demonstrations, make_tasks

import raylight as rl
from examples.starter_models.make import recipe_model

VALIDATION_TASKS, TASKS_PER_STEP = 96, 4


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder or name of a chat model; left out: a tiny one is made")
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/code"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    args = parser.parse_args(arguments)
    if args.model and not HAS_BUBBLEWRAP:
        parser.error("the code of a model needs bubblewrap; install it, or set SANDBOX in agent.py")
    model = args.model or recipe_model(demonstrations, args.output_dir / "initial", seed=args.seed, steps=120)
    gpus = {"num_gpus": 0} if args.cpu else {}
    algorithm = rl.GRPO(
        model=model,
        n_steps=args.steps,
        tasks_per_step=TASKS_PER_STEP,
        group_size=8,
        lr=1e-6 if args.model else 5e-4,
        val_every=5,
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        engine=gpus,
        learner=gpus,
        n_runners=1,
        output_dir=args.output_dir,
        seed=args.seed,
    )
    tasks: list[Any] = make_tasks(TASKS_PER_STEP * args.steps, args.seed + 2)
    trainer.fit(write_function, tasks, val_dataset=make_tasks(VALIDATION_TASKS, 1))


if __name__ == "__main__":
    main()
