"""Train two agents of pydantic-ai in one rollout, each by its own reward.

python examples/desk/train.py                     a tiny model that is made here
python examples/desk/train.py --credit rollout    the reward of the rollout for both agents
python examples/desk/train.py --model PATH        another model
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the package `examples` of a checkout
sys.path.insert(0, str(Path(__file__).resolve().parent))

from agent import answer_ticket
from demonstrations import demonstrate
from tickets import make_tickets

import raylight as rl
from examples.starter_models.make import recipe_model

TICKETS_PER_STEP = 4


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="a language model; left out: a tiny one is made in the output directory"
    )
    parser.add_argument("--credit", choices=("agent", "rollout"), default="agent")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/desk"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    args = parser.parse_args(arguments)
    model = args.model or recipe_model(demonstrate, args.output_dir / "initial", keep=True, steps=160)
    algorithm = rl.GRPO(
        model=model,
        credit=args.credit,
        n_steps=args.steps,
        tasks_per_step=TICKETS_PER_STEP,
        group_size=8,
        lr=1e-6 if args.model else 5e-4,
        val_every=6,
        failure_reward=0.0,  # pydantic-ai gives up on an output that does not validate twice
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
    tickets = make_tickets(TICKETS_PER_STEP * args.steps, args.seed)
    trainer.fit(answer_ticket, tickets, val_dataset=make_tickets(48, 10**9))


if __name__ == "__main__":
    main()
