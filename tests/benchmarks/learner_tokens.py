"""Tokens per second of `Policy.update` and of a bare torch loop, with peak memory and scaling over ranks.

    python tests/benchmarks/learner_tokens.py [--rounds 9] [--shape tiny|small] [--ranks 2] [--packed]
                                              [--real FOLDER]

The bare loop is plain transformers: a padded batch, one forward pass with the output layer on answers only,
the clipped loss, one backward pass, gradient clipping and AdamW. Both loops update on the same batch in
turn. Shape "tiny" has 128 rows of about 20 tokens on the quickstart's model. Shape "small" has 64 rows with
answers of 64 tokens on a random Qwen2 of 20 million parameters. `--real` names a pretrained model, and then
64 rows have 52 tokens on average. With `--ranks`, each rank has one thread, and the batch is sharded across
the ranks.
"""

import argparse
import cProfile
import pstats
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Pairs, join_ranks, make_parser, memory_kib, save_random

from raylight.config import LearnerConfig
from raylight.experience.batches.batch import TrainBatch
from raylight.experience.settings.policy_settings import PolicySettings
from raylight.quickstart import STARTER_MODEL
from raylight.types import Trajectory

SMALL = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
}
SHAPES = {"tiny": (128, 13, (4, 10)), "small": (64, 32, (64, 64)), "real": (64, 39, (6, 20))}
"""Rows, prompt tokens, and tokens of the shortest and the longest answer, by shape."""
GROUP = 8


def save_model(folder: Path, **sizes: Any) -> str:
    """Save a random Qwen2 with the starter model's tokenizer, which verl reads. Return its path."""
    from transformers import Qwen2Config

    common = {"num_key_value_heads": 2, "max_position_embeddings": 65536, "tie_word_embeddings": True}
    return save_random(Qwen2Config(**common, **sizes), folder)


def make_rows(shape: str, vocabulary: int) -> Pairs:
    rows, prompt, (shortest, longest) = SHAPES[shape]
    draw = random.Random(0)

    def tokens(n: int) -> list[int]:
        return [draw.randrange(vocabulary) for _ in range(n)]

    return [(tokens(prompt), tokens(draw.randint(shortest, longest))) for _ in range(rows)]


def as_batch(rows: Pairs, version: int) -> TrainBatch:
    trajectories = [
        Trajectory(
            str(i),
            p + a,
            [0] * len(p) + [1] * len(a),
            [0.0] * len(p) + [-1.0] * len(a),
            [-1] * len(p) + [version] * len(a),
        )
        for i, (p, a) in enumerate(rows)
    ]
    n = len(rows)
    return TrainBatch(
        [float(i % 3 == 0) for i in range(n)],
        [str(i // GROUP) for i in range(n)],
        trajectories,
        list(range(n)),
    )


def bare_step(model_path: str, rows: Pairs) -> Callable[[], None]:
    """Return a hand-written update, from lists of tokens to new weights."""
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="sdpa"
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01)
    advantages = torch.tensor([1.0 if i % 3 == 0 else -0.5 for i in range(len(rows))])[:, None]

    def step() -> None:
        ids = pad_sequence([torch.tensor(p + a) for p, a in rows], batch_first=True)
        lengths = torch.tensor([len(p) + len(a) for p, a in rows])[:, None]
        starts = torch.tensor([len(p) for p, _ in rows])[:, None]
        positions = torch.arange(ids.shape[1])[None]
        hidden = model.base_model(ids, attention_mask=(positions < lengths).long(), use_cache=False)[0]
        mask = ((positions >= starts) & (positions < lengths))[:, 1:]
        logits = model.get_output_embeddings()(hidden[:, :-1][mask])
        logps = logits.log_softmax(-1).gather(1, ids[:, 1:][mask][:, None])[:, 0]
        ratio, gains = (logps - logps.detach()).exp(), advantages.expand(mask.shape)[mask]
        loss = -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def learner_step(model_path: str, rows: Pairs, args: argparse.Namespace) -> Callable[[], None]:
    from raylight.learner.updates.policy import Policy

    settings = PolicySettings(lr=1e-5, max_logprob_mismatch=1e6, calculate_entropy=args.entropy)
    config = LearnerConfig(n=args.ranks, packed=args.packed)
    policy = Policy(model_path, config, settings, total_steps=10_000)
    return lambda: policy.update(as_batch(rows, policy.version))


def seconds(step: Callable[[], None], clock: Callable[[], float]) -> float:
    started = clock()
    step()
    return clock() - started


def rank_main(args: argparse.Namespace) -> None:
    """Run one rank. Rank 0 prints the results."""
    join_ranks(args.rendezvous, args.rank, args.ranks, args.threads)
    model_path = args.model
    vocabulary = {"tiny": 200, "small": 8192, "real": 32_000}[args.shape]
    rows = make_rows(args.shape, vocabulary)
    tokens = sum(len(p) + len(a) for p, a in rows)
    steps: dict[str, Callable[[], None]] = {}
    if args.loop != "bare":
        steps["learner"] = learner_step(model_path, rows, args)
    if args.loop != "learner":
        steps["bare"] = bare_step(model_path, rows)
    durations: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    clock = time.process_time if args.clock == "cpu" else time.perf_counter
    for _ in range(args.rounds):
        for name, step in steps.items():
            durations[name].append(seconds(step, clock))
    if args.rank == 0:
        _show(args, durations, tokens)
    if args.profile and "learner" in steps:
        profile = cProfile.Profile()
        profile.runcall(lambda: [steps["learner"]() for _ in range(args.rounds)])
        if args.rank == 0:
            pstats.Stats(profile).sort_stats("cumulative").print_stats(70)
            pstats.Stats(profile).sort_stats("tottime").print_stats(45)
    dist.destroy_process_group()


def _show(args: argparse.Namespace, durations: dict[str, list[float]], tokens: int) -> None:
    medians = {name: statistics.median(values) for name, values in durations.items()}
    for name, value in medians.items():
        rate = f"{value * 1e3:8.1f} ms, {tokens / value:9.0f} tokens/s"
        print(f"{args.shape:5s} {name:7s} {args.ranks} ranks: {rate}", flush=True)
    if len(medians) == 2:
        ratios = [bare / ours for bare, ours in zip(durations["bare"], durations["learner"], strict=True)]
        overall = medians["bare"] / medians["learner"]
        pairs = f"pairs {min(ratios):.2f} to {max(ratios):.2f}"
        print(f"{args.shape:5s} learner: {overall:.2f} x the speed of the bare loop ({pairs})")
    print(f"{args.shape:5s} peak memory of the process: {memory_kib('VmHWM') / 1024:.0f} MB", flush=True)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shape", choices=[*SHAPES, "all"], default="all")
    parser.add_argument("--real", help="folder of a pretrained model, for the shape of this name")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--loop",
        choices=["both", "learner", "bare"],
        default=None,
        help="loops to run; run only one to measure its peak memory",
    )
    parser.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="wall-clock time, or CPU time of the process if the machine is busy",
    )
    parser.add_argument("--packed", action="store_true")
    parser.add_argument(
        "--entropy",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="also compute the entropy metric",
    )
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rendezvous", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank is not None:
        rank_main(args)
        return
    loop = args.loop or ("both" if args.ranks == 1 else "learner")
    with tempfile.TemporaryDirectory() as folder:
        given = {"real": args.real} if args.real else {"tiny": str(STARTER_MODEL), "small": None}
        for shape in [*given] if args.shape == "all" else [args.shape]:
            model = given[shape] or save_model(Path(folder) / "small", **SMALL)
            values = {name: getattr(args, name) for name in ("rounds", "ranks", "threads", "clock")}
            values |= {"shape": shape, "loop": loop, "model": model}
            values |= {"rendezvous": f"{folder}/rendezvous-{shape}"}
            flags = [f"--{name}={value}" for name, value in values.items()]
            flags += ["--packed"] * args.packed + ["--profile"] * args.profile + ["--entropy"] * args.entropy
            processes = [
                subprocess.Popen([sys.executable, __file__, *flags, f"--rank={rank}"])
                for rank in range(args.ranks)
            ]
            if max(process.wait() for process in processes):
                sys.exit(1)


if __name__ == "__main__":
    main()
