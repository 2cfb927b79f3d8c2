"""Train a model to win a game of two by playing against older versions of itself.

python examples/play/train.py                 a tiny model that is made here
python examples/play/train.py --model PATH    another model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the package `examples` of a checkout
sys.path.insert(0, str(Path(__file__).resolve().parent))

from agent import play
from demonstrations import MOST_STONES, demonstrate

import raylight as rl
from examples.starter_models.make import recipe_model

TASKS_PER_STEP = 8


def make_tasks(count: int) -> list[dict[str, int]]:
    """Return games with all numbers of stones from five on, begun by the policy and by its opponent."""
    games = [{"stones": n, "begins": player} for n in range(5, MOST_STONES + 1) for player in (0, 1)]
    return [games[i % len(games)] for i in range(count)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="a language model; left out: a tiny one is made in the output directory"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/play"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    args = parser.parse_args(arguments)
    model = args.model or recipe_model(
        demonstrate, args.output_dir / "initial", keep=True, accuracy=0.35, steps=50
    )
    algorithm = rl.GRPO(
        model=model,
        opponents=rl.algorithms.SelfPlay(every=4, pool=3),
        n_steps=args.steps,
        tasks_per_step=TASKS_PER_STEP,
        group_size=8,
        lr=1e-5 if args.model else 3e-3,
        entropy_coef=0.02,
        val_every=10,
    )
    gpus: dict[str, Any] = {"num_gpus": 0} if args.cpu else {}
    trainer = rl.Trainer(
        algorithm=algorithm,
        engine=gpus,
        learner={"lora": {"rank": 16}, **gpus},
        n_runners=1,
        output_dir=str(args.output_dir),
        seed=args.seed,
    )
    trainer.fit(play, make_tasks(TASKS_PER_STEP * args.steps), val_dataset=make_tasks(56))


if __name__ == "__main__":
    main()
