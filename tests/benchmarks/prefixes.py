"""Common prefixes in the transformers engine, against a bare loop that computes each prompt once.

    python tests/benchmarks/prefixes.py MODEL [--rounds 3] [--prompts 39 1000] [--turns 20] [--threads 1]

First 64 samples of 28 tokens to 8 prompts: the engine, and transformers' forward pass in a loop with one
prefill of the 8 prompts, whose cache is repeated for the 64 rows. They take turns. Then a conversation: the
prompt tokens that each call computes, and its seconds, with kept prefixes and without.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from harness import make_parser, spread

from raylight.engines.transformers.engine import TransformersEngine
from raylight.engines.transformers.sampling import SamplingParams

GROUPS, GROUP, ANSWER = 8, 8, 28
TURN = 12
"""Tokens of each message of the conversation after the first."""


@torch.inference_mode()
def bare(module: Any, prompts: list[list[int]]) -> None:
    """Sample a group for each prompt, which is computed once."""
    output = module(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
    cache, logits = output.past_key_values, output.logits.repeat_interleave(GROUP, 0)
    cache.batch_repeat_interleave(GROUP)
    for _ in range(ANSWER):
        tokens = logits[:, -1].softmax(-1).multinomial(1)
        logits = module(tokens, past_key_values=cache, use_cache=True).logits


async def sample(engine: TransformersEngine, prompts: list[list[int]]) -> None:
    params = SamplingParams(ANSWER, ignore_eos=True)
    await asyncio.gather(*(engine.generate(ids, params) for ids in prompts for _ in range(GROUP)))


def timed(action: Callable[[], Any]) -> tuple[float, float]:
    """Return the wall-clock and the CPU seconds of an action."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return time.perf_counter() - wall, time.process_time() - cpu


def compare_groups(engine: TransformersEngine, module: Any, length: int, rounds: int) -> None:
    draw, found = random.Random(0), []
    for _ in range(rounds + 1):  # the first one warms up
        prompts = [[draw.randrange(32_000) for _ in range(length)] for _ in range(GROUPS)]
        ours = timed(lambda prompts=prompts: asyncio.run(sample(engine, prompts)))  # type: ignore[misc]
        plain = timed(lambda prompts=prompts: bare(module, prompts))  # type: ignore[misc]
        found.append([theirs / own for own, theirs in zip(ours, plain, strict=True)])
    wall, cpu = zip(*found[1:], strict=True)
    print(
        f"{length} tokens: {spread([*wall], 2)} x the speed of the bare loop, CPU {spread([*cpu], 2)}",
        flush=True,
    )


def converse(engine: TransformersEngine, turns: int, keeps: bool) -> None:
    """Hold a conversation, and print what its calls compute."""
    draw, tokens, seconds, missing = random.Random(1), list(range(40)), [], []
    for _ in range(turns):
        if not keeps:
            engine._decoder.prefixes.clear()
        known = engine._decoder.prefixes.find(None, torch.tensor(tokens, dtype=torch.int32).numpy())[1]
        missing.append(len(tokens) - known)
        start = time.process_time()
        answer = asyncio.run(engine.generate(tokens, SamplingParams(TURN, ignore_eos=True)))
        seconds.append(time.process_time() - start)
        tokens += [*answer.output_ids, *(draw.randrange(32_000) for _ in range(TURN))]
    name, last = "kept" if keeps else "not kept", statistics.median(seconds[-3:])
    print(
        f"{name}: computed {missing}; CPU of the last calls {last:.2f} s, of all {sum(seconds):.1f} s",
        flush=True,
    )


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, nargs="*", default=[39, 1000])
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    args: argparse.Namespace = parser.parse_args()
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(args.threads)
    engine = TransformersEngine(args.model, "policy", slots=GROUPS * GROUP, max_model_len=2048)
    module = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    for length in args.prompts:
        compare_groups(engine, module, length, args.rounds)
    for keeps in (False, True) if args.turns else ():
        converse(engine, args.turns, keeps)
    engine.close()


if __name__ == "__main__":
    main()
