"""Bounds of `noop_rollouts.py`: processes that record the same spans and rewards, and write them to SQLite.

There is no queue, lease, trace of an attempt, raylight span or state machine.
"""

import json
import multiprocessing
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

BATCH, WARM_UP = 64, 200
"""Rollouts of a transaction, and those before the measured ones."""
SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = NORMAL;
CREATE TABLE rollouts (id TEXT UNIQUE, input TEXT, status TEXT);
CREATE TABLE attempts (id TEXT UNIQUE, rollout TEXT, status TEXT);
CREATE TABLE spans (
    attempt TEXT, id TEXT, name TEXT, started REAL, ended REAL, attributes TEXT, UNIQUE (attempt, id)
);
"""
Rollout = tuple[str, str, str, list[tuple[Any, ...]]]
"""Ids of the rollout and of its attempt, the input, and its spans."""


def bare(count: int, processes: int) -> float:
    """Return rollouts per second of processes that each write to their own file."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        pool.map(write_rollouts, [WARM_UP] * processes)
        started = time.perf_counter()
        pool.map(write_rollouts, [count // processes] * processes)
        per_second = count / (time.perf_counter() - started)
    print(f"bare: {per_second:.0f} rollouts/s ({count} rollouts, {processes} processes)")
    return per_second


def one_store(count: int, processes: int) -> float:
    """Return rollouts per second of actors that send their rollouts to one actor, which writes them."""
    import ray

    ray.init(address="local", log_to_driver=False, logging_level="ERROR")
    try:
        with tempfile.TemporaryDirectory() as folder:
            store = ray.remote(BareStore).options(num_cpus=0).remote(f"{folder}/bare.db")
            runners = [ray.remote(BareRunner).options(num_cpus=0).remote(store) for _ in range(processes)]
            ray.get([runner.run.remote(f"warm-up {i}", WARM_UP) for i, runner in enumerate(runners)])
            started = time.perf_counter()
            ray.get([runner.run.remote(str(i), count // processes) for i, runner in enumerate(runners)])
            per_second = count / (time.perf_counter() - started)
    finally:
        ray.shutdown()
    print(f"one store: {per_second:.0f} rollouts/s ({count} rollouts, {processes} processes)")
    return per_second


def write_rollouts(count: int) -> None:
    """Record rollouts, and write them to a file of this process."""
    with tempfile.TemporaryDirectory() as folder:
        store = BareStore(f"{folder}/bare.db")
        with closing(store.db):
            for batch in recorded("", count):
                store.add(batch)


class BareStore:
    """A file, to which each message is written in one transaction."""

    def __init__(self, path: str) -> None:
        self.db = sqlite3.connect(path)
        self.db.executescript(SCHEMA)

    def add(self, rollouts: list[Rollout]) -> None:
        """Write rollouts that were executed: they are queued, leased and decided."""
        for rollout_id, attempt_id, task, spans in rollouts:
            self.db.execute("INSERT INTO rollouts VALUES (?, ?, 'running')", (rollout_id, task))
            self.db.execute("INSERT INTO attempts VALUES (?, ?, 'running')", (attempt_id, rollout_id))
            self.db.executemany("INSERT INTO spans VALUES (?, ?, ?, ?, ?, ?)", spans)
            self.db.execute("UPDATE attempts SET status = 'succeeded' WHERE id = ?", (attempt_id,))
            self.db.execute("UPDATE rollouts SET status = 'succeeded' WHERE id = ?", (rollout_id,))
        self.db.commit()


class BareRunner:
    """Actor that executes the agent; while one message is written, it fills the next."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def run(self, name: str, count: int) -> None:
        import ray

        written = None
        for batch in recorded(name, count):
            if written is not None:
                ray.get(written)
            written = self._store.add.remote(batch)
        ray.get(written)


def recorded(name: str, count: int) -> Iterator[list[Rollout]]:
    """Execute the agent's spans and a reward `count` times; yield what is to be written, in batches.

    Args:
        name: distinguishes the ids of processes that share a store.
    """
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    tracer = provider.get_tracer("noop")
    for first in range(0, count, BATCH):
        batch: list[Rollout] = []
        for number in range(first, min(first + BATCH, count)):
            for i in range(3):
                with tracer.start_as_current_span(f"step {i}") as span:
                    span.set_attributes({"text": "x" * 200, "number": i})
            with tracer.start_as_current_span("reward") as span:
                span.set_attributes({"name": "primary", "value": 1.0})
            attempt_id = f"at-{name}-{number}"
            rows = [
                (
                    attempt_id,
                    f"{each.context.span_id:016x}",
                    each.name,
                    each.start_time,
                    each.end_time,
                    json.dumps(dict(each.attributes or {})),
                )
                for each in spans.get_finished_spans()
            ]
            spans.clear()
            batch.append((f"ro-{name}-{number}", attempt_id, f"task {number}", rows))
        yield batch
