"""No-op rollouts per second, end to end, with two runners and the durable store.

    python tests/benchmarks/noop_rollouts.py [--count 3000] [--runners 2] [--rounds 3] [--peer DIR]

Each rollout emits three OpenTelemetry spans and a reward. With `--peer`, the virtual environment of
agent-lightning 0.3 in DIR runs `--peer-script` in turn with raylight, and the median and range of the ratios
are printed. Its default strategy is cs (processes and HTTP); shm is threads around an in-memory store.

"bare" is a bound: as many processes as runners, of which each records the same spans with OpenTelemetry and
writes them, its rollouts and their attempts to a SQLite file of its own, a transaction for 64 rollouts. There
is no queue, no lease and no message.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import resource
import signal
import sqlite3
import statistics
import subprocess
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import raylight as rl

BATCH, WARM_UP = 64, 200
"""Rollouts of a transaction, and those before the measured ones, of "bare"."""


SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE rollouts (id TEXT UNIQUE, input TEXT, status TEXT);
CREATE TABLE attempts (id TEXT UNIQUE, rollout TEXT, status TEXT);
CREATE TABLE spans (
    attempt TEXT, id TEXT, name TEXT, started REAL, ended REAL, attributes TEXT, UNIQUE (attempt, id)
);
"""
"""Tables of "bare"."""


class TimedRollouts(rl.Algorithm):
    """Algorithm that runs a warm-up batch of rollouts, then times a second batch."""

    def __init__(self, count: int, warm_up: int = 100) -> None:
        self.count = count
        self.warm_up = warm_up
        self.per_second = 0.0

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        await self._batch(self.warm_up)
        started = time.perf_counter()
        await self._batch(self.count)
        self.per_second = self.count / (time.perf_counter() - started)

    async def _batch(self, count: int) -> None:
        store = self.get_store()
        requests = [rl.EnqueueRolloutRequest(input=f"task {i}", mode="train") for i in range(count)]
        ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
        await store.wait_for_rollouts(rollout_ids=ids)
        states = await store.get_rollout_states(ids)
        assert {state.status for state in states} == {"succeeded"}, "a no-op rollout did not succeed"


@rl.rollout
async def agent(task: str, llm: rl.LLM) -> float:
    from opentelemetry import trace

    tracer = trace.get_tracer("noop")
    for i in range(3):
        with tracer.start_as_current_span(f"step {i}") as span:
            span.set_attributes({"text": "x" * 200, "number": i})
    return 1.0


def ours(count: int, runners: int) -> float:
    algorithm = TimedRollouts(count)
    with tempfile.TemporaryDirectory() as folder:
        trainer = rl.Trainer(
            algorithm=algorithm,
            n_runners=runners,
            output_dir=folder,
            progress=False,
            initial_resources={"llm": rl.LLM(endpoint="http://unused", model="m")},
        )
        trainer.fit(agent)
        size = (Path(folder) / "store.db").stat().st_size
    scale = f"{count} rollouts, {runners} runners, store.db {size / 1e6:.1f} MB"
    print(f"raylight: {algorithm.per_second:.0f} rollouts/s ({scale})")
    return algorithm.per_second


def bare(count: int, processes: int) -> float:
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        pool.map(record_rollouts, [WARM_UP] * processes)
        started = time.perf_counter()
        pool.map(record_rollouts, [count // processes] * processes)
        per_second = count / (time.perf_counter() - started)
    print(f"bare: {per_second:.0f} rollouts/s ({count} rollouts, {processes} processes)")
    return per_second


def record_rollouts(count: int) -> None:
    """Execute the agent's spans and a reward `count` times, and write them."""
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = provider.get_tracer("noop")
    with tempfile.TemporaryDirectory() as folder, closing(sqlite3.connect(f"{folder}/bare.db")) as db:
        db.executescript(SCHEMA)
        for first in range(0, count, BATCH):
            for number in range(first, min(first + BATCH, count)):
                for i in range(3):
                    with tracer.start_as_current_span(f"step {i}") as span:
                        span.set_attributes({"text": "x" * 200, "number": i})
                with tracer.start_as_current_span("reward") as span:
                    span.set_attributes({"name": "primary", "value": 1.0})
                ids = f"ro-{number}", f"at-{number}"
                db.execute("INSERT INTO rollouts VALUES (?, ?, 'running')", (ids[0], f"task {number}"))
                db.execute("INSERT INTO attempts VALUES (?, ?, 'running')", (ids[1], ids[0]))
                rows = [
                    (
                        ids[1],
                        f"{each.context.span_id:016x}",
                        each.name,
                        each.start_time,
                        each.end_time,
                        json.dumps(dict(each.attributes or {})),
                    )
                    for each in spans.get_finished_spans()
                ]
                spans.clear()
                db.executemany("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)", rows)
                db.execute("UPDATE attempts SET status = 'succeeded' WHERE id = ?", (ids[1],))
                db.execute("UPDATE rollouts SET status = 'succeeded' WHERE id = ?", (ids[0],))
            db.commit()


def peer(python: Path, script: Path, count: int, runners: int, strategy: str) -> float:
    command = [str(python), str(script), str(count), str(runners), strategy]
    running = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    assert running.stdout
    output = ""
    for line in running.stdout:
        output += line
        if "RESULT" in line:
            break
    os.killpg(running.pid, signal.SIGKILL)  # it may not exit by itself
    result = re.search(r"RESULT .* ([\d.]+) rollouts/s", output)
    if result is None:
        raise SystemExit(f"{script} printed no RESULT line; its output ends with: {output[-1500:]}")
    print(f"agent-lightning 0.3, {strategy}: {result[1]} rollouts/s ({count} rollouts, {runners} runner(s))")
    return float(result[1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--runners", type=int, default=2)
    parser.add_argument("--peer", type=Path, help="virtual environment of agent-lightning 0.3")
    parser.add_argument(
        "--peer-script", type=Path, help="script for agent-lightning, called as: SCRIPT COUNT RUNNERS cs|shm"
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    os.environ.setdefault("RAY_ADDRESS", "local")
    peers = {"cs": (200, args.runners), "shm": (1000, 1)} if args.peer else {}  # shm supports one runner only
    ratios: dict[str, list[float]] = {strategy: [] for strategy in ["bare", *peers]}
    for _ in range(args.rounds):
        mine = ours(args.count, args.runners)
        ratios["bare"].append(mine / bare(args.count, args.runners))
        for strategy, (count, runners) in peers.items():
            theirs = peer(args.peer / "bin" / "python", args.peer_script, count, runners, strategy)
            ratios[strategy].append(mine / theirs)
    for strategy, found in ratios.items():
        print(f"ratio to {strategy}: {statistics.median(found):.1f} ({min(found):.1f} to {max(found):.1f})")
    print(f"driver's peak memory: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MB")


if __name__ == "__main__":
    main()
