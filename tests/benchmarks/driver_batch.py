"""Cost of a step's rollouts in the driver, and bytes that reach each learner rank, as a Markdown table.

    python tests/benchmarks/driver_batch.py [--against OTHER_CHECKOUT] [--repeats 3]

The store runs in this process without Ray. Each repetition reads the rollouts, builds the batch and makes
what two ranks receive, with rollouts of 500 tokens in 1 turn and of 32,000 tokens in 20 turns. Times are CPU
milliseconds per rollout; "blocked" is the longest CPU time of the event loop between two of its turns, a read
by the store included. With `--against`, both checkouts are measured in turn, in separate processes; the
median of each figure is shown.
"""

import asyncio
import itertools
import json
import pickle
import random
import time
from pathlib import Path
from typing import Any

import psutil
from harness import checkouts, make_parser, medians, run_script

VOCABULARY = 8192
SHAPES = {"500 tokens x 1 turn": (500, 1, 128), "32k tokens x 20 turns": (32_000, 20, 16)}
"""Tokens of a rollout, its turns, and the number of rollouts."""
RANKS = 2
TICK_S = 0.001


def make_calls(rollout_id: str, attempt_id: str, tokens: int, turns: int) -> list[Any]:
    """Return the generations of a conversation in which every turn has an observation and an answer."""
    from raylight.types import CallKey, Generation

    source, known, calls, step = random.Random(rollout_id), [], [], tokens // turns // 2
    for turn in range(turns):
        known = known + [source.randrange(VOCABULARY) for _ in range(step)]
        answer = [source.randrange(VOCABULARY) for _ in range(step)]
        key = CallKey(rollout_id, attempt_id, f"{attempt_id}-{turn}")
        logprobs = [-source.random() for _ in answer]
        calls.append(
            Generation(key, "policy", known, answer, logprobs, [3] * step, "stop", float(turn), turn + 0.5)  # type: ignore[arg-type]
        )
        known = known + answer
    return calls


async def record(store: Any, tokens: int, turns: int, count: int) -> list[str]:
    """Store finished rollouts in groups of eight; return their ids."""
    from raylight.semconv import ANNOTATION, reward_attributes
    from raylight.types import Span

    ids = []
    for number in range(count):
        rollout = await store.start_rollout(number, group_id=f"g{number // 8}")
        names = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
        for call in make_calls(**names, tokens=tokens, turns=turns):
            await store.capture([(call.key, call.start_time)], [(call.key, call, None)])
        attributes = dict(reward_attributes({"primary": float(number % 3)}))
        reward = Span.from_attributes(name=ANNOTATION, attributes=attributes, **names)
        await store.finish_attempt(rollout, "succeeded", spans=[reward])
        ids.append(rollout.rollout_id)
    return ids


def payloads(batch: Any, settings: Any) -> list[bytes]:
    """Return what each rank receives."""
    from raylight.experience.batches.shards import shard_batch

    return [pickle.dumps(shard, protocol=5) for shard in shard_batch(batch, settings, RANKS)]


def make_rows(data: bytes) -> int:
    """Do what a rank does with its part; return its number of rows."""
    from raylight.learner.tokens.rows import build_rows

    part = pickle.loads(data)
    return len(build_rows(part.rows, part.outline.owners.tolist()))


async def watch(blocked: list[float]) -> None:
    """Record the CPU time of the event loop's thread between its turns."""
    while True:
        before = time.thread_time()
        await asyncio.sleep(TICK_S)
        blocked.append(time.thread_time() - before)


async def measure(tokens: int, turns: int, count: int) -> dict[str, float]:
    """Return the figures of a row of the table."""
    import raylight as rl
    from raylight.config import LearnerConfig
    from raylight.experience.batches.batch import build_batch
    from raylight.store.client import StoreClient
    from raylight.store.service import StoreConfig, StoreService

    algorithm = rl.GRPO(model="m")
    learner = LearnerConfig(max_row_tokens=2 * tokens, max_tokens_per_micro_batch=2 * tokens)
    service = StoreService(None, StoreConfig(), time.time)
    store = StoreClient(service)
    blocked: list[float] = []
    try:
        ids = await record(store, tokens, turns, count)
        for _ in range(2):  # the first pass imports modules
            blocked.clear()
            ticker = asyncio.create_task(watch(blocked))
            await asyncio.sleep(0)
            times = [time.process_time()]
            finished = await store.collect(ids)
            times.append(time.process_time())
            batch, _ = await asyncio.to_thread(build_batch, finished, algorithm.batch_rules(learner))
            times.append(time.process_time())
            parts = await asyncio.to_thread(payloads, batch, algorithm)
            times.append(time.process_time())
            await asyncio.sleep(2 * TICK_S)  # the ticker records the last wait
            ticker.cancel()
    finally:
        await service.close()
    memory = psutil.Process().memory_info().rss
    make_rows(parts[0])  # imports torch
    started = time.process_time()
    make_rows(parts[0])
    rank_ms = (time.process_time() - started) * 1e3
    read, build, split = (1e3 * (b - a) / count for a, b in itertools.pairwise(times))
    return {
        "read": read,
        "build": build,
        "split, pickle": split,
        "all": read + build + split,
        "blocked, ms": 1e3 * max(blocked),
        "rank": rank_ms / count,
        "kB per rank": len(parts[0]) / count / 1e3,
        "driver, MB": memory / 1e6,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES)
    args = parser.parse_args()
    if args.shape:
        print(json.dumps(asyncio.run(measure(*SHAPES[args.shape]))))
        return
    roots = checkouts(args.against)
    header = None
    for shape in SHAPES:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in roots}
        for _ in range(args.repeats):
            for name, root in roots.items():
                runs[name].append(run_script(__file__, "--shape", shape, checkout=root))
        for name, measured in runs.items():
            if header is None:
                header = list(measured[0])
                print(f"| rollouts | checkout | {' | '.join(header)} |")
                print("|---|---|" + "---|" * len(header))
            figures = [f"{figure:.3g}" for figure in medians(measured).values()]
            print(f"| {shape} | {name} | {' | '.join(figures)} |", flush=True)


if __name__ == "__main__":
    main()
