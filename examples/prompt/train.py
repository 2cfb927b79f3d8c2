"""Improve an agent's prompt by a search (APO), and then its model by rewards (GRPO), in one store.

python examples/prompt/train.py                 the quickstart's model and a stand-in proposer, on a CPU
python examples/prompt/train.py --model PATH --critic-url https://api.example.com/v1 --critic-model NAME
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import ray
from agent import FIRST_PROMPT, adder
from openai import AsyncOpenAI
from proposer import CRITIC, EDITOR, templated_proposer

import raylight as rl
from raylight.config import StoreConfig
from raylight.quickstart import STARTER_MODEL
from raylight.quickstart.additions import additions
from raylight.store.actor import start_store
from raylight.trainer.ray_session.connection import ray_session


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="the agent's model; left out: the quickstart's")
    parser.add_argument(
        "--critic-url", help="endpoint of the model that rewrites prompts; key: OPENAI_API_KEY"
    )
    parser.add_argument("--critic-model", default="gpt-5-mini", help="its name at the endpoint")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of the prompt's search")
    parser.add_argument("--steps", type=int, default=20, help="steps of GRPO")
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/prompt"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    args = parser.parse_args(arguments)
    try:
        run(args)
    except rl.RaylightError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def run(args: argparse.Namespace) -> None:
    """Search a prompt, train the model with it, and print the reward after each."""
    train, val = additions(args.seed)
    gpus = {"num_gpus": 0} if args.cpu else {}
    options: dict[str, Any] = {"engine": gpus, "n_runners": 1, "seed": args.seed}
    with ray_session(None, log_to_driver=False):
        args.output_dir.mkdir(parents=True, exist_ok=True)
        actor = start_store("prompt", str(args.output_dir.resolve() / "store.db"), StoreConfig())
        options["store"] = rl.StoreClient(actor)
        search = search_prompt(args, options, train, val)
        best = search.get_best_prompt()
        grpo = rl.GRPO(
            model=args.model or STARTER_MODEL,
            n_steps=args.steps,
            lr=1e-6 if args.model else 2e-4,
            kl_coef=1e-3,
            val_every=5,
            val_samples=2,
        )
        resources = {"prompt_template": best}
        trained = rl.Trainer(
            algorithm=grpo,
            learner=gpus,
            initial_resources=resources,
            output_dir=args.output_dir / "grpo",
            **options,
        ).fit(adder, train, val)
        ray.get(actor.close.remote())
    first = search.history.candidates[0].val_score
    print(f"first prompt      {first:.3f}  {FIRST_PROMPT.template}")
    print(f"prompt by APO     {trained['reward_before']:.3f}  {best.template}")
    print(f"model by GRPO     {trained['reward_after']:.3f}  {trained['steps']} steps")


def search_prompt(args: argparse.Namespace, options: dict[str, Any], train: Any, val: Any) -> rl.APO:
    """Return the finished search."""
    url, names = contextlib.nullcontext(args.critic_url), [args.critic_model] * 2
    if args.critic_url is None:
        url, names = templated_proposer(args.seed), [CRITIC, EDITOR]
    with url as base_url:
        client = AsyncOpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
        apo = rl.APO(
            client,
            gradient_model=names[0],
            apply_edit_model=names[1],
            beam_width=2,
            branch_factor=3,
            beam_rounds=args.rounds,
            val_batch_size=32,
            served_model=args.model or STARTER_MODEL,
            seed=args.seed,
        )
        resources = {"prompt_template": FIRST_PROMPT}
        folder = args.output_dir / "apo"
        rl.Trainer(algorithm=apo, initial_resources=resources, output_dir=folder, **options).fit(
            adder, train, val
        )
    return apo


if __name__ == "__main__":
    main()
