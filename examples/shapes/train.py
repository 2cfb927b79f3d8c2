"""Train a tiny vision-language model to read which shape an image has.

python examples/shapes/train.py                 a model that is made here, on a CPU
python examples/shapes/train.py --blank         the same without the shapes: it learns nothing
python examples/shapes/train.py --model PATH    another model
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from agent import name_shape
from drawing import SHAPES
from model import make_model

import raylight as rl

VALIDATION_TASKS = 128


def make_tasks(count: int, seed: int, blank: bool) -> list[dict[str, Any]]:
    """Return tasks with equally many drawings of each shape."""
    chance, letters = random.Random(seed), list(SHAPES)
    return [
        {"shape": letters[i % len(letters)], "seed": chance.getrandbits(32), "blank": blank}
        for i in range(count)
    ]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="folder of a vision-language model; left out: a tiny one is made")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/shapes"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--blank", action="store_true", help="show white images")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    args = parser.parse_args(arguments)
    model = args.model or make_model(args.output_dir / "initial", args.seed)
    learner: dict[str, Any] = {"train_vision": args.model is None}
    engine: dict[str, Any] = {"kind": "transformers", "max_model_len": 1024, "max_concurrent": 64}
    if args.cpu:
        learner["num_gpus"] = engine["num_gpus"] = 0
    algorithm = rl.GRPO(
        model=model,
        n_steps=args.steps,
        tasks_per_step=16,
        group_size=8,
        lr=1e-6 if args.model else 2e-3,
        lr_schedule="cosine",
        lr_warmup_steps=5,
        val_every=10,
        val_samples=2,
    )
    trainer = rl.Trainer(
        algorithm=algorithm,
        engine=engine,
        learner=learner,
        n_runners=1,
        output_dir=args.output_dir,
        seed=args.seed,
    )
    tasks = make_tasks(16 * args.steps, 0, args.blank)
    trainer.fit(name_shape, tasks, val_dataset=make_tasks(VALIDATION_TASKS, 1, args.blank))


if __name__ == "__main__":
    main()
