"""Calls per second, bytes and reading time of the store, for short and for long conversations.

    python tests/benchmarks/store_calls.py [--rollouts 32] [--baseline CHECKOUT] [--repeats 3]

The store runs in this process without Ray, so that only the store and its client are measured. `short` is one
call of a 500-token prompt in each rollout; `long` are 20 calls of a conversation that grows to 32,000 tokens.
Each call is announced and recorded with its span, as serving does it. `tokens` are those in the file, for
each rollout. Times are CPU times of this process, so that other load does not count. With `--baseline`,
another checkout of raylight (`git worktree add`) is measured in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import checkouts, make_parser, medians, record_of, run_script

TURNS, TURN_TOKENS, ANSWER_TOKENS = 20, 1_600, 400
SHORT_PROMPT = 500
CHARACTERS = 4
"""Characters of a token."""
CASES = ("short", "long")
Record = tuple[Any, Any, Any]


def make_records(rollout: Any, case: str, rng: random.Random) -> list[Record]:
    """Return keys, generations and spans of a rollout's calls."""
    from raylight.types import CallKey

    tokens, messages, records = [], [], []
    for turn in range(TURNS if case == "long" else 1):
        added = TURN_TOKENS - ANSWER_TOKENS if case == "long" else SHORT_PROMPT
        tokens += [rng.randrange(150_000) for _ in range(added)]
        messages.append({"role": "user", "content": _text(added, rng)})
        output = [rng.randrange(150_000) for _ in range(ANSWER_TOKENS if case == "long" else 50)]
        answer = {"role": "assistant", "content": _text(len(output), rng)}
        key = CallKey(rollout.rollout_id, rollout.attempt.attempt_id, f"{rng.getrandbits(128):032x}")
        logprobs = [-rng.random() for _ in output]
        messages.append(answer)
        call, span = record_of(key, list(tokens), output, logprobs, turn, messages)
        records.append((key, call, span))
        tokens += output
    return records


def _text(tokens: int, rng: random.Random) -> str:
    return "".join(rng.choices("abcdefgh ", k=tokens * CHARACTERS))


async def measure(case: str, n_rollouts: int) -> dict[str, float]:
    """Record and read rollouts, all of them concurrently, with the turns of each one after another."""
    from raylight.store.client import StoreClient
    from raylight.store.service import StoreService

    rng = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        service = StoreService(path)
        store = StoreClient(service)
        rollouts = [await store.start_rollout(number) for number in range(n_rollouts)]
        records = [make_records(rollout, case, rng) for rollout in rollouts]
        started = time.process_time()
        await asyncio.gather(*(_record(store, calls) for calls in records))
        seconds = time.process_time() - started
        for rollout in rollouts:
            await store.finish_attempt(rollout, "succeeded")
        started = time.process_time()
        for rollout in rollouts:
            (finished,) = await store.collect([rollout.rollout_id])
            assert len(finished.generations) == len(records[0])
        read = time.process_time() - started
        started = time.process_time()
        for rollout in rollouts:
            await store.collect([rollout.rollout_id], with_spans=True)
        read_spans = time.process_time() - started
        (data,) = service._journal.fetch_one("SELECT SUM(LENGTH(generation)) FROM calls") or (0,)
        await service.close()
        size = path.stat().st_size
    n_calls = sum(map(len, records))
    last = records[0][-1][1]
    outputs = sum(len(call.output_ids) for _, call, _ in records[0])
    logprobs_and_versions = n_calls * (outputs / len(records[0])) * (4 if _has_arrays(last) else 16)
    return {
        "calls/s": n_calls / seconds,
        "kB on disk/call": size / n_calls / 1e3,
        "tokens/rollout": (data - logprobs_and_versions) / 4 / n_rollouts,
        "ms to read": read / n_rollouts * 1e3,
        "ms with spans": read_spans / n_rollouts * 1e3,
    }


def _has_arrays(call: Any) -> bool:
    return not isinstance(call.output_ids, list)


async def _record(store: Any, records: list[Record]) -> None:
    for key, call, span in records:
        await store.capture([(key, call.start_time)], [])
        await store.capture([], [(key, call, span)])


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        asyncio.run(measure(args.case, 1))  # imports modules
        print(json.dumps(asyncio.run(measure(args.case, args.rollouts))))
        return
    roots = checkouts(args.baseline)
    for case in CASES:
        count = args.rollouts * (1 if case == "long" else TURNS)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in roots}
        for _ in range(args.repeats):
            for name, root in roots.items():
                measured = run_script(__file__, "--case", case, "--rollouts", count, checkout=root)
                runs[name].append(measured)
        print(f"{case}: medians of {args.repeats}")
        for name, results in runs.items():
            figures = medians(results).items()
            print(f"  {name:14}" + "".join(f"{value:12,.1f} {key}" for key, value in figures))


if __name__ == "__main__":
    main()
