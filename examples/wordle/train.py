"""Train a model to play a game of many turns.

python examples/wordle/train.py                                  a small game, a tiny model
python examples/wordle/train.py --model PATH --game Wordle-v0    another model and game
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the package `examples` of a checkout
sys.path.insert(0, str(Path(__file__).resolve().parent))

from agent import SMALL_GAME, make_player
from demonstrations import demonstrate

import raylight as rl
from examples.starter_models.make import recipe_model

VALIDATION_GAMES = 40


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="a language model; left out: a tiny one is made in the output directory"
    )
    parser.add_argument("--game", default=SMALL_GAME, help="id of a game of TextArena for one player")
    parser.add_argument("--max-tokens", type=int, default=1024, help="longest answer of --model, in tokens")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/wordle"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    args = parser.parse_args(arguments)
    model = args.model or recipe_model(
        demonstrate, args.output_dir / "initial", keep=True, accuracy=0.4, steps=160
    )
    player = make_player(max_tokens=args.max_tokens if args.model else 8)
    if args.game != SMALL_GAME:
        player = make_player(args.game, {}, guesses=12, max_tokens=args.max_tokens)
    algorithm = rl.GRPO(
        model=model,
        n_steps=args.steps,
        tasks_per_step=16,
        group_size=8,
        lr=1e-6 if args.model else 5e-4,
        val_every=6,
    )
    gpus: dict[str, Any] = {"num_gpus": 0} if args.cpu else {}
    trainer = rl.Trainer(
        algorithm=algorithm,
        engine=gpus,
        learner=gpus,
        n_runners=1,
        output_dir=str(args.output_dir),
        seed=args.seed,
    )
    tasks = rl.environments.seeds(16 * args.steps)
    games = rl.environments.seeds(VALIDATION_GAMES, start=10**6)
    trainer.fit(player, tasks, val_dataset=games)


if __name__ == "__main__":
    main()
