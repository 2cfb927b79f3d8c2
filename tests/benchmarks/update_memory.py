"""Peak memory and seconds of a policy update over vocabulary and tokens, against another commit and TRL.

    git worktree add /tmp/before COMMIT
    python tests/benchmarks/update_memory.py [--before /tmp/before] [--trl] [--shapes 32768x4096 151936x2048]

Each measurement is a separate process, so that peaks do not mix. It builds a random Qwen2 of 2 layers and
makes two updates on rows of 512 tokens, a quarter of them the prompt. It reports the faster update, and
the peak memory beyond what the process used before. The contestants take turns. "trl" is the loss of TRL's
GRPOTrainer in a plain loop: logits of the responses, `selective_log_softmax` and `entropy_from_logits` (needs
`pip install trl`).
"""

import argparse
import functools
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import ROOT, Pairs, checkouts, join_ranks, make_parser, memory_kib, run_script
from learner_tokens import as_batch, save_model

ROW_TOKENS = 512


def make_rows(tokens: int, vocabulary: int) -> Pairs:
    draw = random.Random(0)
    prompt = ROW_TOKENS // 4
    rows = [[draw.randrange(vocabulary) for _ in range(ROW_TOKENS)] for _ in range(tokens // ROW_TOKENS)]
    return [(row[:prompt], row[prompt:]) for row in rows]


def learner_update(model: str, rows: Pairs, tokens: int) -> Callable[[], Any]:
    from raylight.config import LearnerConfig
    from raylight.experience.settings.policy_settings import PolicySettings
    from raylight.learner.updates.policy import Policy

    settings = PolicySettings(lr=1e-5, max_logprob_mismatch=1e6, calculate_entropy=True)
    policy = Policy(model, LearnerConfig(max_tokens_per_micro_batch=tokens), settings, total_steps=100)
    return lambda: policy.update(as_batch(rows, policy.version))


def trl_update(model: str, rows: Pairs, tokens: int) -> Callable[[], Any]:
    from transformers import AutoModelForCausalLM
    from trl.trainer.utils import entropy_from_logits, selective_log_softmax

    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-5, weight_decay=0.01)
    advantages = torch.tensor([1.0 if i % 3 == 0 else -0.5 for i in range(len(rows))])[:, None]

    def update() -> None:
        ids = torch.tensor([prompt + answer for prompt, answer in rows])
        kept = len(rows[0][1])
        logits = module(ids, use_cache=False, logits_to_keep=kept + 1).logits[:, :-1]
        logps = selective_log_softmax(logits, ids[:, -kept:])
        with torch.no_grad():
            entropy_from_logits(logits)
        ratio = (logps - logps.detach()).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        optimizer.zero_grad()
        (-gain.mean()).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()

    return update


def measure(args: argparse.Namespace, build: Callable[[Pairs, int], Callable[[], Any]]) -> dict[str, float]:
    """Measure one contestant in this process.

    Args:
        build: returns the update of rows, given them and their number of tokens.
    """
    (shape,) = args.shapes
    vocabulary, tokens = map(int, shape.split("x"))
    rows = make_rows(tokens, vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        join_ranks(f"{folder}/rendezvous", threads=args.threads)
        update = build(rows, tokens)
        before = memory_kib("VmHWM")
        seconds = []
        for _ in range(2):
            start = time.process_time()
            update()
            seconds.append(time.process_time() - start)
        dist.destroy_process_group()
    return {"seconds": min(seconds), "kib": memory_kib("VmHWM") - before}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--shapes", nargs="+", default=["32768x4096", "151936x2048"], help="vocabulary x tokens of an update"
    )
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--before", type=Path, help="worktree of another commit")
    parser.add_argument("--trl", action="store_true")
    parser.add_argument("--contestant", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.contestant:
        build = trl_update if args.contestant == "trl" else learner_update
        print(json.dumps(measure(args, functools.partial(build, args.model))))
        return
    contestants = checkouts(args.before) | ({"trl": ROOT} if args.trl else {})
    print(f"{'shape':>14} {'':8} {'CPU seconds':>11} {'peak MiB':>9}")
    for shape in args.shapes:
        with tempfile.TemporaryDirectory() as folder:
            sizes = {"hidden_size": args.hidden, "intermediate_size": 2 * args.hidden}
            sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4}
            save_model(Path(folder), vocab_size=int(shape.split("x")[0]), **sizes)
            options = ["--model", folder, "--shapes", shape, "--threads", args.threads]
            found: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}
            for _ in range(args.rounds):
                for name, path in contestants.items():
                    found[name].append(run_script(__file__, "--contestant", name, *options, checkout=path))
            for name, results in found.items():
                seconds = min(result["seconds"] for result in results)
                peak = min(result["kib"] for result in results) / 1024
                print(f"{shape:>14} {name:8} {seconds:11.2f} {peak:9.0f}", flush=True)


if __name__ == "__main__":
    main()
