"""Train a small model to solve word problems, on a GPU of 4 GB or on a CPU.

    python examples/small_gpu/train.py                                  a tiny model, which only adds
    python examples/small_gpu/train.py --model Qwen/Qwen2.5-0.5B-Instruct    another model
    python examples/small_gpu/benchmark.py --model PATH --lora-adapter outputs/small_gpu/checkpoint/adapter

One process holds one copy of the model, samples from it and trains a LoRA adapter in it: see
docs/minigrpo.md. The memory of the run is estimated before the model is loaded, and a run that needs too much
is rejected.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import raylight as rl
from examples.small_gpu.agent import PROMPTS, MathSolver, NumberReward
from examples.small_gpu.questions import training_questions
from raylight.quickstart import STARTER_MODEL

ROOM_FOR_PROMPT = 256
"""Maximum number of prompt tokens."""
ADDITIONS: dict[str, Any] = {
    "model": STARTER_MODEL,
    "data": "additions",
    "prompt": "plain",
    "steps": 12,
    "tasks_per_step": 16,
    "lr": 2e-3,
    "max_new_tokens": 8,
}
"""Other defaults without `--model`."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model",
        help="folder, or name in the local Hugging Face cache; left out: the quickstart's, which adds",
    )
    parser.add_argument(
        "--data", default="words", help="words, additions, or a .jsonl file with question and answer"
    )
    parser.add_argument(
        "--prompt",
        choices=sorted(PROMPTS),
        default="cot",
        help="plain: the model responds with the number only",
    )
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--tasks-per-step", type=int, default=4)
    parser.add_argument(
        "--group-size", type=int, default=8, help="responses to each question, which are compared"
    )
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument(
        "--memory-gb",
        type=float,
        default=3.5,
        help="memory limit of the run; a GPU of 4 GB has about 3.5 GB free",
    )
    parser.add_argument("--val-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--n-runners", type=int, default=1)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/small_gpu"))
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    if parser.parse_args(arguments).model is None:
        parser.set_defaults(**ADDITIONS)
    return parser.parse_args(arguments)


def algorithm(args: argparse.Namespace) -> rl.MiniGRPO:
    return rl.MiniGRPO(
        model=args.model,
        n_steps=args.steps,
        tasks_per_step=args.tasks_per_step,
        group_size=args.group_size,
        lr=args.lr,
        max_model_len=args.max_new_tokens + ROOM_FOR_PROMPT,
        max_new_tokens=args.max_new_tokens,
        memory_limit_gb=args.memory_gb,
        max_concurrent=16,
        val_every=args.val_every,
        save_every=args.val_every,
        seed=args.seed,
        device="cpu" if args.cpu else "auto",
    )


def train(args: argparse.Namespace) -> None:
    train_tasks, val_tasks = training_questions(args.data)
    trainer = rl.Trainer(
        algorithm=algorithm(args),
        hooks=NumberReward(args.prompt),
        n_runners=args.n_runners,
        output_dir=args.output_dir,
    )
    trainer.fit(MathSolver(args.prompt, args.max_new_tokens), train_tasks, val_dataset=val_tasks)


def main() -> None:
    try:
        train(parse())
    except rl.RaylightError as error:
        sys.exit(f"error: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
