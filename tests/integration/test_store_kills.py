"""The store's actor is killed repeatedly while runners work: no acknowledged data is lost or duplicated."""

import asyncio
import os
import random
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import raylight as rl
from raylight.store.client import StoreClient

KILLS = 20
BATCH = 40


@rl.rollout
async def agent(task: int, llm: rl.LLM) -> float:
    """Emit three spans, a message and a reward."""
    import asyncio

    from opentelemetry import trace

    for i in range(3):
        with trace.get_tracer("test").start_as_current_span(f"step {i}") as span:
            span.set_attribute("task", task)
            await asyncio.sleep(0.005)
    rl.emit_message(f"task {task}")
    return float(task)


class EnqueueUntilDone(rl.Algorithm):
    """Algorithm that enqueues batches, each with new resources, until the store was killed often enough."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.started = threading.Event()
        self.acknowledged: dict[str, int] = {}
        self.versions: list[str] = []
        self.results: list[Any] = []
        self.statistics: dict[str, int] = {}

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        store = self.get_store()
        while not self.done.is_set():
            update = await store.add_resources(
                {"llm": rl.LLM(endpoint="http://unused", model=f"m{len(self.versions)}")}
            )
            self.versions.append(update.resources_id)
            first = len(self.acknowledged)
            requests = [rl.EnqueueRolloutRequest(input=first + i, mode="train") for i in range(BATCH)]
            rollouts = await store.enqueue_many_rollouts(requests)
            self.acknowledged |= {rollout.rollout_id: rollout.input for rollout in rollouts}
            self.started.set()
            await store.wait_until_decided(
                rollout_ids=[rollout.rollout_id for rollout in rollouts], timeout=120
            )
        self.results = await store.collect(list(self.acknowledged), with_spans=True)
        self.statistics = await store.statistics()
        self.versions_found = [update.resources_id for update in await store.query_resources()]
        self.all_rollouts = await store.query_rollouts()


def kill_the_store(store: StoreClient, algorithm: EnqueueUntilDone) -> None:
    """Kill the store's actor at random moments, each time after it has restarted."""
    import ray

    assert algorithm.started.wait(60)
    rng, handle, last = random.Random(7), store._channel.target, None
    moment = threading.Event()
    try:
        for _ in range(KILLS):
            pid = ray.get(handle.__ray_call__.remote(lambda self: os.getpid()), timeout=60)
            assert pid != last
            moment.wait(rng.uniform(0.0, 0.4))
            os.kill(pid, signal.SIGKILL)
            last = pid
    finally:
        algorithm.done.set()


class EnqueueWhileKilling(EnqueueUntilDone):
    """Algorithm that starts the killer as soon as it has a store."""

    async def run(self, train_dataset: Any = None, val_dataset: Any = None) -> None:
        killer = asyncio.create_task(asyncio.to_thread(kill_the_store, self.get_store(), self))
        await super().run()
        await killer


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_nothing_acknowledged_is_lost_and_nothing_appears_twice(
    tmp_path: Path, no_processes_left: None
) -> None:
    algorithm = EnqueueWhileKilling()
    trainer = rl.Trainer(
        algorithm=algorithm, n_runners=4, output_dir=tmp_path, progress=False, address="local"
    )
    summary = trainer.fit(agent)

    assert len(algorithm.results) == len(algorithm.acknowledged) >= BATCH
    for item in algorithm.results:
        task = algorithm.acknowledged[item.rollout.rollout_id]
        assert item.rollout.status == "succeeded", item.rollout
        assert item.rollout.input == task
        assert item.reward == float(task)
        names = Counter(span.name for span in item.spans)
        assert names == {
            "step 0": 1,
            "step 1": 1,
            "step 2": 1,
            "agentlightning.message": 1,
            "agentlightning.annotation": 1,
        }
        assert [span.sequence_id for span in item.spans] == sorted({span.sequence_id for span in item.spans})
    assert {rollout.rollout_id for rollout in algorithm.all_rollouts} >= algorithm.acknowledged.keys()
    assert len(algorithm.all_rollouts) == len({rollout.rollout_id for rollout in algorithm.all_rollouts})
    assert [v for v in algorithm.versions_found if v in set(algorithm.versions)] == algorithm.versions
    print(
        f"{summary['rollouts']} rollouts through {KILLS} kills, {summary['seconds']} s, "
        f"{algorithm.statistics}"
    )
