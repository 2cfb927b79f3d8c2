"""Cost per rollout and memory of the store as it grows to 100,000 rollouts; rates of span writes and queries;
time to open the file again, and of queries of the full store.

    python tests/benchmarks/store_growth.py [--count 100000]

The store runs in this process without Ray, so that only the store is measured. Each rollout is enqueued,
dequeued, finished with four spans (one with a reward) and collected. The CPU time includes the store and its
client; on a machine with other load it says more than the wall time. A million rollouts take five minutes and
3 GB of disk.
"""

import asyncio
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import psutil
from harness import make_parser

from raylight.semconv import ANNOTATION, reward_attributes
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.types import EnqueueRolloutRequest, Rollout, Span

BATCH = 500


def make_spans(rollout: Rollout) -> list[Span]:
    assert rollout.attempt
    ids = {"rollout_id": rollout.rollout_id, "attempt_id": rollout.attempt.attempt_id}
    steps = [
        Span.from_attributes(name=f"step {i}", attributes={"text": "x" * 200, "number": i}, **ids)
        for i in range(3)
    ]
    return [
        *steps,
        Span.from_attributes(name=ANNOTATION, attributes=dict(reward_attributes({"primary": 1.0})), **ids),
    ]


def _megabytes(path: Path) -> float:
    return path.stat().st_size / 1e6


async def one_batch(store: StoreClient) -> None:
    ids = [
        r.rollout_id
        for r in await store.enqueue_many_rollouts([EnqueueRolloutRequest(input=i) for i in range(BATCH)])
    ]
    left = BATCH
    while left:
        rollouts = await store.dequeue_many_rollouts(limit=8, worker_id="w")
        left -= len(rollouts)
        await asyncio.gather(
            *(store.finish_attempt(rollout, "succeeded", spans=make_spans(rollout)) for rollout in rollouts)
        )
    finished = await store.collect(ids)
    assert all(item.reward == 1.0 for item in finished)


async def grow(store: StoreClient, path: Path, count: int) -> None:
    print(f"{'rollouts':>9}{'us/rollout':>12}{'CPU us':>8}{'memory MB':>11}{'file MB':>9}")
    next_row, started, since = 1000, (time.perf_counter(), time.process_time()), 0
    first = None
    for done in range(BATCH, count + 1, BATCH):
        await one_batch(store)
        if done >= next_row or done == count:
            wall = (time.perf_counter() - started[0]) / (done - since) * 1e6
            cost = (time.process_time() - started[1]) / (done - since) * 1e6
            memory = psutil.Process().memory_info().rss / 1e6
            print(f"{done:9}{wall:12.0f}{cost:8.0f}{memory:11.0f}{_megabytes(path):9.0f}", flush=True)
            first = first or (cost, memory)
            last = (cost, memory)
            next_row = done + (100_000 if done >= 100_000 else 90_000 if done >= 10_000 else 3000)
            started, since = (time.perf_counter(), time.process_time()), done
    assert first
    print(f"first to last row: CPU x {last[0] / first[0]:.2f}, memory {last[1] - first[1]:+.0f} MB")


async def spans(store: StoreClient) -> None:
    (rollout,) = [await store.start_rollout("many spans")]
    many = [span for _ in range(2500) for span in make_spans(rollout)]
    started = time.perf_counter()
    for i in range(0, len(many), 500):
        await store.add_many_spans(many[i : i + 500])
    print(f"ingestion: {len(many) / (time.perf_counter() - started):.0f} spans/s (one rollout, 500 at once)")
    started = time.perf_counter()
    found = await store.query_spans(rollout.rollout_id, "latest")
    print(
        f"query: {len(found) / (time.perf_counter() - started):.0f} spans/s (all {len(found)} of a rollout)"
    )
    started = time.perf_counter()
    for _ in range(200):
        assert len(await store.query_spans(rollout.rollout_id, "latest", name=ANNOTATION, limit=10)) == 10
    print(f"query: {200 / (time.perf_counter() - started):.0f} queries/s (10 spans by name)")


async def reopen(path: Path) -> None:
    """Time the start of a store with a full file, and what commands and the driver ask of it."""

    async def timed(name: str, asked: Awaitable[Any]) -> Any:
        started = time.perf_counter()
        answer = await asked
        print(f"{name}: {(time.perf_counter() - started) * 1e3:.1f} ms")
        return answer

    started = time.perf_counter()
    service = StoreService(path)
    store = StoreClient(service)
    print(f"opened the full file: {(time.perf_counter() - started) * 1e3:.1f} ms")
    await timed("statistics", store.statistics())
    newest = store.query_rollouts(sort_by="start_time", sort_order="desc", limit=20)
    await timed("newest 20 rollouts", newest)
    page = await timed("first 20 that succeeded", store.query_rollouts(status_in=["succeeded"], limit=20))
    ids = [rollout.rollout_id for rollout in page]
    await timed("20 rollouts collected", store.collect(ids, with_spans=True))
    await timed("states of 20 rollouts", store.get_rollout_states(ids))
    await service.close()


async def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    count = parser.parse_args().count
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store.db"
        service = StoreService(path)
        store = StoreClient(service)
        await store.add_resources({"prompt": "x"})
        await grow(store, path, count)
        await spans(store)
        await service.close()
        await reopen(path)


if __name__ == "__main__":
    asyncio.run(main())
