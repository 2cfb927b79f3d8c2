"""Train a real pretrained model, SmolLM2-135M-Instruct, on a CPU in minutes.

    python examples/real_model/train.py
    python examples/real_model/train.py --lora
    python examples/real_model/train.py --max-staleness 1
    python examples/real_model/train.py --one-process

The model comes in a Python package, see pretrained.py. It knows how to list things, but rarely lists three of
them and stops. GRPO teaches it to.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from agent import MAX_TOKENS, TRAINING, VALIDATION, list_three
from pretrained import make_pretrained

import raylight as rl

MAX_MODEL_LEN = 256
LEARNING_RATES = {"full": 1e-5, "lora": 5e-4}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train SmolLM2-135M-Instruct to list three things.")
    parser.add_argument("--model", type=Path, help="folder of another chat model; SmolLM2 if not given")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tasks-per-step", type=int, default=4, help="each with 8 rollouts")
    parser.add_argument("--lora", action="store_true", help="train an adapter of rank 16")
    parser.add_argument(
        "--one-process", action="store_true", help="MiniGRPO: an adapter, trained in the engine's own model"
    )
    parser.add_argument("--max-staleness", type=int, default=0, help="1: sample during updates")
    parser.add_argument("--lr", type=float, help="1e-5, or 5e-4 with an adapter")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/real_model"))
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    return parser.parse_args(arguments)


def learner(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of the learner: it computes on all CPUs of this machine, or on its GPU, in passes
    of about 15 rows, whose activations fit in a laptop's memory."""
    settings: dict[str, Any] = {"num_threads": os.cpu_count(), "max_tokens_per_micro_batch": 1024}
    settings |= {"num_gpus": 0} if args.cpu else {}
    return settings | {"lora": {"rank": 16}} if args.lora else settings


def train(args: argparse.Namespace) -> None:
    model = args.model or make_pretrained("smollm2", Path("outputs/smollm2"))
    engine = {"max_model_len": MAX_MODEL_LEN} | ({"num_gpus": 0} if args.cpu else {})
    method, settings = rl.GRPO, {"engine": engine, "learner": learner(args)}
    options: dict[str, Any] = {"max_staleness": args.max_staleness}
    if args.one_process:
        method, settings = rl.MiniGRPO, {}
        options = {"max_model_len": MAX_MODEL_LEN, "max_new_tokens": MAX_TOKENS, "lora": {"rank": 16}}
        options |= {"device": "cpu"} if args.cpu else {}
    algorithm = method(
        model=str(model),
        n_steps=args.steps,
        tasks_per_step=args.tasks_per_step,
        group_size=8,
        lr=args.lr or LEARNING_RATES["lora" if args.lora or args.one_process else "full"],
        val_every=max(args.steps // 2, 1),
        val_samples=4,
        **options,
    )
    trainer = rl.Trainer(
        algorithm=algorithm, n_runners=1, output_dir=args.output_dir, seed=args.seed, **settings
    )
    trainer.fit(
        list_three,
        [{"kind": kind} for kind in TRAINING],
        val_dataset=[{"kind": kind} for kind in VALIDATION],
    )


def main() -> None:
    try:
        train(parse())
    except rl.RaylightError as error:
        sys.exit(f"error: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
