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
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TURNS, TURN_TOKENS, ANSWER_TOKENS = 20, 1_600, 400
SHORT_PROMPT = 500
CHARACTERS = 4
"""Characters of a token."""
CASES = ("short", "long")
Record = tuple[Any, Any, Any]


def make_records(rollout: Any, case: str, rng: random.Random) -> list[Record]:
    """Return keys, generations and spans of a rollout's calls."""
    from raylight.semconv import CALL_ID, DIALECT, INPUT_MESSAGES, OUTPUT_MESSAGES, REQUEST_PARAMETERS
    from raylight.types import CallKey, Generation, Span

    tokens, messages, records = [], [], []
    for turn in range(TURNS if case == "long" else 1):
        added = TURN_TOKENS - ANSWER_TOKENS if case == "long" else SHORT_PROMPT
        tokens += [rng.randrange(150_000) for _ in range(added)]
        messages.append({"role": "user", "content": _text(added, rng)})
        output = [rng.randrange(150_000) for _ in range(ANSWER_TOKENS if case == "long" else 50)]
        answer = {"role": "assistant", "content": _text(len(output), rng)}
        key = CallKey(rollout.rollout_id, rollout.attempt.attempt_id, f"{rng.getrandbits(128):032x}")
        call = Generation(
            key=key,
            model="policy",
            prompt_ids=list(tokens),  # type: ignore[arg-type]  # the baseline has lists
            output_ids=output,  # type: ignore[arg-type]
            logprobs=[-rng.random() for _ in output],  # type: ignore[arg-type]
            weight_versions=[3] * len(output),  # type: ignore[arg-type]
            finish_reason="stop",
            start_time=float(turn),
            end_time=turn + 1.0,
            sampling={"temperature": 1.0},
        )
        attributes = {
            INPUT_MESSAGES: json.dumps(messages),
            OUTPUT_MESSAGES: json.dumps([answer]),
            REQUEST_PARAMETERS: json.dumps({"model": "policy", "temperature": 1.0}),
            DIALECT: "chat",
            CALL_ID: key.call_id,
        }
        span = Span.from_attributes(
            name="openai.chat.completion",
            attributes=attributes,
            rollout_id=key.rollout_id,
            attempt_id=key.attempt_id,
            span_id=key.call_id[:16],
            trace_id=key.call_id,
            start_time=call.start_time,
            end_time=call.end_time,
        )
        records.append((key, call, span))
        tokens += output
        messages.append(answer)
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


def measure_checkout(checkout: Path, case: str, n_rollouts: int) -> dict[str, float]:
    """Measure a checkout in a process of its own."""
    command = [sys.executable, __file__, "--case", case, "--rollouts", str(n_rollouts)]
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    result = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(result.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rollouts", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        asyncio.run(measure(args.case, 1))  # imports modules
        print(json.dumps(asyncio.run(measure(args.case, args.rollouts))))
        return
    checkouts = {"this checkout": Path(__file__).parents[2]}
    if args.baseline:
        checkouts = {"baseline": args.baseline.resolve(), **checkouts}
    for case in CASES:
        count = args.rollouts * (1 if case == "long" else TURNS)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in checkouts}
        for _ in range(args.repeats):
            for name, checkout in checkouts.items():
                runs[name].append(measure_checkout(checkout, case, count))
        print(f"{case}: medians of {args.repeats}")
        for name, results in runs.items():
            medians = {key: statistics.median(result[key] for result in results) for key in results[0]}
            print(f"  {name:14}" + "".join(f"{value:12,.1f} {key}" for key, value in medians.items()))


if __name__ == "__main__":
    main()
