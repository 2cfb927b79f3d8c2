"""Score a model, with or without a LoRA adapter, on word problems, without training.

    python examples/small_gpu/benchmark.py --model PATH
    python examples/small_gpu/benchmark.py --model PATH --lora-adapter outputs/small_gpu/checkpoint/adapter
    python examples/small_gpu/benchmark.py --model PATH --data test.jsonl --samples 4

The scores are written to eval.json, and every response to eval.jsonl: see docs/evaluation.md.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import raylight as rl
from examples.small_gpu.agent import PROMPTS, MathSolver, NumberReward
from examples.small_gpu.questions import benchmark_questions


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="folder, or name in the local Hugging Face cache")
    parser.add_argument(
        "--lora-adapter", help="folder of a LoRA adapter in peft's format, such as a run's checkpoint"
    )
    parser.add_argument(
        "--data", default="words", help="words, additions, or a .jsonl file with question and answer"
    )
    parser.add_argument("--prompt", choices=sorted(PROMPTS), default="cot", help="prompt of the training")
    parser.add_argument("--limit", type=int, help="number of questions; all by default")
    parser.add_argument("--samples", type=int, default=1, help="responses to each question")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--n-runners", type=int, default=1)
    parser.add_argument("--output-dir", type=Path, default=Path("outputs/small_gpu_benchmark"))
    return parser.parse_args(arguments)


def engine() -> dict[str, Any]:
    """Return engine settings for 4 GB: half precision on a GPU, few concurrent sequences."""
    import torch

    on_gpu = torch.cuda.is_available()
    return {
        "kind": "transformers",
        "num_gpus": 1 if on_gpu else 0,
        "dtype": "bfloat16" if on_gpu else "float32",
        "max_model_len": 1024,
        "max_concurrent": 16,
    }


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Return the scores of `Trainer.evaluate`.

    Raises:
        RaylightError: the model, the adapter or the data is missing, or no rollout has a reward.
    """
    trainer = rl.Trainer(
        hooks=NumberReward(args.prompt), n_runners=args.n_runners, output_dir=args.output_dir, engine=engine()
    )
    return trainer.evaluate(
        MathSolver(args.prompt, args.max_new_tokens),
        benchmark_questions(args.data, args.limit),
        model=args.model,
        lora_adapter=args.lora_adapter,
        samples=args.samples,
        sampling={"temperature": args.temperature},
    )


def main() -> None:
    try:
        benchmark(parse())
    except rl.RaylightError as error:
        sys.exit(f"error: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
