"""Train a model without a verifier: against a reward model that is trained from preferences, or a judge.

python examples/judge/train.py                                     a reward model from pairs; a tiny model
python examples/judge/train.py --reward judge                      a rubric; a stand-in is the judge
python examples/judge/train.py --reward judge --judge URL NAME     a rubric; a real judge
python examples/judge/train.py --model PATH                        another model
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for the package `examples` of a checkout
sys.path.insert(0, str(Path(__file__).resolve().parent))

from agent import answer_customer
from replies import demonstrate, make_pairs, make_tasks
from stand_in import CRITERIA, serve_stand_in

import raylight as rl
from examples.starter_models.make import recipe_model


def train_reward_model(model: str, folder: Path, lr: float, seed: int, gpus: dict[str, Any]) -> Any:
    """Train a reward model from pairs; return it as a group reward."""
    algorithm = rl.RewardModel(
        model=model,
        data=make_pairs(640, seed),
        val_data=make_pairs(96, seed + 10**6),
        n_steps=20,
        lr=lr,
        best=None,
    )
    rl.Trainer(algorithm=algorithm, learner=gpus, output_dir=str(folder), seed=seed).fit()
    return rl.rewards.reward_model(str(folder / "checkpoint"), num_cpus=0.25)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", help="a language model; left out: a tiny one is made in the output directory"
    )
    parser.add_argument("--reward", choices=("model", "judge"), default="model")
    parser.add_argument(
        "--judge", nargs=2, metavar=("URL", "NAME"), help="endpoint and model; its key is JUDGE_API_KEY"
    )
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/judge"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    args = parser.parse_args(arguments)
    if args.judge and args.reward != "judge":
        parser.error("--judge needs --reward judge")
    gpus: dict[str, Any] = {"num_gpus": 0} if args.cpu else {}
    # an accuracy of a sixth is the most that can be reached: the teacher draws its answers
    model = args.model or recipe_model(
        demonstrate, args.output_dir / "initial", keep=True, accuracy=0.12, steps=60
    )
    with contextlib.ExitStack() as stack:
        if args.reward == "model":
            lr = 1e-5 if args.model else 1e-3
            reward = train_reward_model(model, args.output_dir / "reward_model", lr, args.seed, gpus)
        elif args.judge:
            url, name = args.judge
            llm = rl.LLM(endpoint=url, model=name, api_key=os.environ.get("JUDGE_API_KEY"))
            reward = rl.rewards.rubric(CRITERIA, llm)
        else:
            reward = rl.rewards.rubric(CRITERIA, stack.enter_context(serve_stand_in()))
        algorithm = rl.GRPO(
            model=model,
            n_steps=args.steps,
            tasks_per_step=4,
            group_size=8,
            lr=1e-6 if args.model else 5e-4,
            kl_coef=0.1,  # a reward model scores nonsense highly where it has seen none
            val_every=6,
            best=None,
        )
        trainer = rl.Trainer(
            algorithm=algorithm,
            engine=gpus,
            learner=gpus,
            n_runners=1,
            group_reward=reward,
            output_dir=str(args.output_dir),
            seed=args.seed,
        )
        trainer.fit(answer_customer, make_tasks(4 * args.steps), val_dataset=make_tasks(48))


if __name__ == "__main__":
    main()
