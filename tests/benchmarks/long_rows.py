"""Time and memory by the length of a conversation, from the gateway to the update, as a Markdown table.

    python tests/benchmarks/long_rows.py [--tokens 1024 4096 16384 32768] [--threads 1]

Each length is a separate process. A conversation of 16 turns passes the gateway's layers in this process,
in front of an engine that answers at once: each call sends the whole history, four characters a token. Then
two conversations of that length are recorded in a store in this process, read, built into a batch, split for
a rank, and trained, on a random Qwen2 of two layers. Times are CPU milliseconds per 1,000 tokens, so that a
cost which is linear in the length is the same in each row. "attention" is the part of the update that grows
with the square of the length: torch's attention of the same layers alone, forward and backward. Memory is the
peak of the process during a second update above what it held before, and the store's file, per token.
"""

import asyncio
import itertools
import json
import pickle
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from capture import MockEngine
from driver_batch import VOCABULARY, record
from gateway_layers import SECRET, call, stacks
from harness import join_ranks, make_parser, memory_kib, reset_peak, run_script, start_attempts
from learner_tokens import save_model

from raylight.agent.attempt_keys import attempt_key

TURNS, ROWS = 16, 2
LAYERS, HEADS, HEAD_SIZE = 2, 4, 32
MODEL = {
    "vocab_size": VOCABULARY,
    "hidden_size": HEADS * HEAD_SIZE,
    "intermediate_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}


def conversation(tokens: int) -> list[bytes]:
    """Return the bodies of the calls of a conversation."""
    text = "word" * (tokens // TURNS // 2)
    history: list[dict[str, str]] = []
    bodies = []
    for turn in range(TURNS):
        history.append({"role": "user", "content": f"{turn} {text}"})
        bodies.append(json.dumps({"model": "m", "messages": history, "max_tokens": 32, "temperature": 1.0}))
        history.append({"role": "assistant", "content": text})
    return [body.encode() for body in bodies]


async def capture_s(store: Any, tokens: int) -> float:
    """Return the CPU time of a conversation in the gateway and its store, in seconds."""
    engine = MockEngine(0.0)
    app = stacks(engine, await engine.app(), store)["the store itself, in this process"]
    used = 0.0
    for _ in range(2):  # the first one imports modules
        ((rollout, attempt),) = await start_attempts(store, 1)
        key = attempt_key(SECRET, rollout, attempt)
        started = time.process_time()
        for body in conversation(tokens):
            await call(app, (rollout, attempt), key, body)
        used = time.process_time() - started
    return used


async def make_batch(tokens: int, folder: Path) -> tuple[dict[str, float], Any]:
    """Record, read, build and split; return the figures, and the batch."""
    import raylight as rl
    from raylight.config import LearnerConfig
    from raylight.experience.batches.batch import build_batch
    from raylight.experience.batches.shards import shard_batch
    from raylight.store.client import StoreClient
    from raylight.store.service import StoreConfig, StoreService

    algorithm = rl.GRPO(model="m")
    learner = LearnerConfig(max_row_tokens=2 * tokens, max_tokens_per_micro_batch=2 * tokens)
    service = StoreService(folder / "store.db", StoreConfig(), time.time)
    store = StoreClient(service)
    await record(store, 1024, TURNS, ROWS)  # imports modules
    captured = await capture_s(store, tokens)
    before = stored_bytes(folder)
    times = [time.process_time()]
    ids = await record(store, tokens, TURNS, ROWS)
    times.append(time.process_time())
    stored = stored_bytes(folder) - before
    finished = await store.collect(ids)
    times.append(time.process_time())
    batch, _ = build_batch(finished, algorithm.batch_rules(learner))
    (part,) = (pickle.dumps(part, protocol=5) for part in shard_batch(batch, algorithm, 1))
    times.append(time.process_time())
    await service.close()
    names = ("store", "read", "build, split")
    seconds = dict(zip(names, (b - a for a, b in itertools.pairwise(times)), strict=True))
    figures = {"capture": 1e6 * captured / tokens}
    figures |= {name: 1e6 * value / ROWS / tokens for name, value in seconds.items()}
    return figures | {"file B": stored / ROWS / tokens, "to a rank B": len(part) / ROWS / tokens}, batch


def stored_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("store.db*"))


def attention_s(tokens: int) -> float:
    """Return the CPU time of the layers' attention of one row, forward and backward."""
    from torch.nn.functional import scaled_dot_product_attention

    query, key, value = (torch.randn(1, HEADS, tokens, HEAD_SIZE, requires_grad=True) for _ in range(3))
    started = time.process_time()
    scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()
    return LAYERS * (time.process_time() - started)


def update(batch: Any, tokens: int, model: str) -> dict[str, float]:
    """Train the rows, each in its own pass; return the figures of the second update."""
    from raylight.config import LearnerConfig
    from raylight.experience.settings.policy_settings import PolicySettings
    from raylight.learner.updates.policy import Policy

    settings = PolicySettings(lr=1e-5, max_logprob_mismatch=1e6)
    config = LearnerConfig(max_row_tokens=2 * tokens, max_tokens_per_micro_batch=2 * tokens)
    policy = Policy(model, config, settings, total_steps=100)
    policy.update(batch)
    before = memory_kib("VmRSS")
    reset_peak()
    started = time.process_time()
    policy.update(batch)
    used = time.process_time() - started
    return {
        "update": 1e6 * used / ROWS / tokens,
        "attention": 1e6 * attention_s(tokens) / tokens,
        "peak KiB": (memory_kib("VmHWM") - before) / tokens,
    }


def measure(tokens: int, threads: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        join_ranks(folder / "rendezvous", threads=threads)
        figures, batch = asyncio.run(make_batch(tokens, folder))
        return figures | update(batch, tokens, save_model(folder / "model", **MODEL))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384, 32768])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", action="store_true", help="measure one length in this process")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(*args.tokens, args.threads)))
        return
    for number, tokens in enumerate(args.tokens):
        figures = run_script(__file__, "--one", "--tokens", tokens, "--threads", args.threads)
        if not number:
            print(f"| tokens | {' | '.join(figures)} |\n|---|{'---|' * len(figures)}")
        print(f"| {tokens:,} | {' | '.join(f'{value:.3g}' for value in figures.values())} |", flush=True)


if __name__ == "__main__":
    main()
