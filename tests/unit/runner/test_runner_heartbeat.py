"""Heartbeats of a runner, what the store answers to them, and agents that do not let go."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from unit_helpers import Endless, enqueue, make_runner, serving, until, wait_and_read, within

from raylight.agent.hooks import Hook
from raylight.config import StoreConfig
from raylight.runner import execute as execute_module
from raylight.runner import runner as module
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.types import Rollout


@pytest.fixture
def leave() -> Iterator[threading.Event]:
    """Event that hanging synchronous agents wait for; set at the end of the test."""
    event = threading.Event()
    yield event
    event.set()


# content of a heartbeat


async def test_a_heartbeat_tells_how_the_runner_is_and_what_it_does(store: StoreClient) -> None:
    inside = asyncio.Event()

    async def agent(task: int) -> None:
        if task == 2:
            inside.set()
        await asyncio.Event().wait()

    ids = await enqueue(store, [1, 2])
    beats: list[dict[str, Any]] = []
    named: list[list[str]] = []
    told = asyncio.Event()

    class Watching(StoreClient):
        async def heartbeat(
            self, worker_id: str, heartbeat_stats: dict[str, Any], attempt_ids: Sequence[str]
        ) -> list[str]:
            beats.append(heartbeat_stats)
            named.append(list(attempt_ids))
            over = await super().heartbeat(worker_id, heartbeat_stats, attempt_ids)
            if heartbeat_stats["rollouts"]:
                told.set()
            return over

    async with serving(Watching(store._channel.target), agent, heartbeat_s=0.01):
        await inside.wait()
        await told.wait()
        worker = await store.get_worker_by_id("w")
        rollouts = [await store.get_rollout_by_id(rollout_id) for rollout_id in ids]
    assert worker.status == "busy"
    assert worker.heartbeat_stats is not None
    assert set(worker.heartbeat_stats) == {"cpu_percent", "memory_bytes", "rollouts", "abandoned"}
    assert worker.heartbeat_stats["memory_bytes"] > 2**20
    assert all(beat["cpu_percent"] >= 0 for beat in beats)
    assert beats[-1]["rollouts"] == ids
    assert named[-1] == [rollout.attempt.attempt_id for rollout in rollouts]
    assert worker.last_heartbeat_time is not None


async def test_the_first_heartbeat_comes_at_once(store: StoreClient) -> None:
    came = asyncio.Event()

    class Watching(StoreClient):
        async def heartbeat(self, *args: Any) -> list[str]:
            came.set()
            return await super().heartbeat(*args)

    async with serving(Watching(store._channel.target), lambda task: None, heartbeat_s=600):
        await came.wait()


async def test_heartbeats_keep_a_silent_attempt_alive_beyond_its_lease() -> None:
    store = StoreClient(StoreService(config=StoreConfig(lease_s=0.5)))

    async def silent(task: int) -> float:
        await asyncio.sleep(1.5)  # three leases without a word
        return 1.0

    ids = await enqueue(store, [1])
    async with serving(store, silent, heartbeat_s=0.02):
        (decided,) = await wait_and_read(store, ids)
    assert (decided.status, decided.attempt.sequence_id) == ("succeeded", 1)


# what the store no longer needs


@pytest.mark.parametrize("asynchronous", [True, False], ids=["async", "sync"])
async def test_a_cancelled_rollout_is_cancelled_in_the_runner(
    store: StoreClient, asynchronous: bool, leave: threading.Event
) -> None:
    agent = Endless()
    inside, loop = agent.inside, asyncio.get_running_loop()

    def blocking(task: int) -> None:
        loop.call_soon_threadsafe(inside.set)
        leave.wait(60)

    ended: list[Any] = []

    class Noting(Hook):
        def on_rollout_end(self, *, rollout: Rollout) -> None:  # type: ignore[override]
            ended.append(rollout.rollout_id)

    (rollout_id,) = await enqueue(store, [1], max_attempts=3, retry_condition=["failed"])
    chosen = agent.run if asynchronous else blocking
    async with serving(store, chosen, 1, heartbeat_s=0.01, hooks=[Noting()]) as task:
        await inside.wait()
        await store.cancel_rollout(rollout_id)
        if asynchronous:
            await agent.cleaned.wait()
        while (attempt := await store.get_latest_attempt(rollout_id)) and attempt.status != "failed":  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        (other,) = await enqueue(store, [2])  # the place is free again
        inside.clear()
        await inside.wait()
        assert not task.done()
        await store.cancel_rollout(other)
    assert (attempt.failure.kind, ended[0]) == ("cancelled", rollout_id)
    decided = await store.get_rollout_by_id(rollout_id)
    assert (decided.status, decided.attempt.sequence_id) == ("cancelled", 1)


async def test_notes_of_an_attempt_that_nobody_needs_are_not_kept(store: StoreClient) -> None:
    inside = asyncio.Event()

    async def agent(task: int, rollout: Rollout) -> None:
        rollout.metadata["stale"] = True
        inside.set()
        await asyncio.Event().wait()

    (rollout_id,) = await enqueue(store, [1])
    async with serving(store, agent, heartbeat_s=0.01, max_rollouts=1) as task:
        await inside.wait()
        await store.cancel_rollout(rollout_id)
        assert await task == "max_rollouts"
    assert (await store.get_rollout_by_id(rollout_id)).metadata == {}


async def test_an_attempt_that_ran_out_of_time_in_the_store_is_cancelled(store: StoreClient) -> None:
    """The store's clock decides; the runner's own limit did not come yet."""
    agent = Endless()
    (rollout_id,) = await enqueue(store, [1])
    async with serving(store, agent.run, heartbeat_s=0.01, max_rollouts=1) as task:
        await agent.inside.wait()
        await store.update_attempt(rollout_id, "latest", status="timeout")
        await agent.cleaned.wait()
        assert await task == "max_rollouts"
    decided = await store.get_rollout_by_id(rollout_id)
    assert (decided.status, decided.attempt.status) == ("failed", "timeout")


class Telling(StoreClient):
    """Store that reports every attempt as obsolete once it is switched on."""

    def __init__(self, target: Any) -> None:
        super().__init__(target)
        self.telling = asyncio.Event()
        self.told = asyncio.Event()
        self.finishing = asyncio.Event()
        self.gate = asyncio.Event()

    async def heartbeat(
        self, worker_id: str, heartbeat_stats: dict[str, Any], attempt_ids: Sequence[str]
    ) -> list[str]:
        await super().heartbeat(worker_id, heartbeat_stats, attempt_ids)
        if not self.telling.is_set():
            return []
        if attempt_ids:
            asyncio.get_running_loop().call_soon(self.told.set)
        return list(attempt_ids)

    async def finish_attempt(self, *args: Any, **kwargs: Any) -> Rollout:
        self.finishing.set()
        await self.gate.wait()
        return await super().finish_attempt(*args, **kwargs)


async def test_an_attempt_that_is_just_being_decided_is_not_cancelled(store: StoreClient) -> None:
    """The heartbeat's response crosses the end of the attempt: it is decided, and the runner lives."""
    telling = Telling(store._channel.target)
    (rollout_id,) = await enqueue(store, [1])
    async with serving(telling, lambda task: 0.5, heartbeat_s=0.005) as task:
        await telling.finishing.wait()
        telling.telling.set()
        await telling.told.wait()
        telling.gate.set()
        (decided,) = await wait_and_read(store, [rollout_id])
        telling.telling.clear()
        (other,) = await enqueue(store, [2])
        await store.wait_until_decided(rollout_ids=[other])
        assert not task.done()
    assert (decided.status, decided.attempt.failure) == ("succeeded", None)


async def test_an_attempt_is_cancelled_once_however_often_the_store_says_so(store: StoreClient) -> None:
    """A second cancellation would end the clean-up that the first one began."""
    telling = Telling(store._channel.target)
    telling.gate.set()
    inside, steps = asyncio.Event(), []

    async def agent(task: int) -> None:
        inside.set()
        try:
            await asyncio.Event().wait()
        finally:
            telling.told.clear()
            for step in range(3):
                await telling.told.wait()  # another heartbeat reported the same
                telling.told.clear()
                steps.append(step)

    await enqueue(store, [1])
    async with serving(telling, agent, heartbeat_s=0.005, max_rollouts=1) as task:
        await inside.wait()
        telling.telling.set()
        assert await task == "max_rollouts"
    assert steps == [0, 1, 2]


# agents that do not let go


async def test_an_agent_that_swallows_its_cancellation_is_abandoned_counted_and_costs_no_other(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execute_module, "CANCEL_GRACE_S", 0.02)
    let_go = asyncio.Event()

    async def agent(task: str) -> float:
        for _ in range(2 if task == "stubborn" else 0):  # the loop's own end cancels it too
            with contextlib.suppress(asyncio.CancelledError):
                await let_go.wait()
        return 1.0

    stubborn = await enqueue(store, ["stubborn"], timeout_seconds=0.05)
    async with serving(store, agent, 1, heartbeat_s=0.01):
        (decided,) = await wait_and_read(store, stubborn)
        assert (decided.attempt.status, decided.attempt.failure.kind) == ("timeout", "timeout")
        others = await wait_and_read(store, await enqueue(store, ["good"] * 5))
        assert {rollout.status for rollout in others} == {"succeeded"}
        await abandoned_are(store, 1)
        let_go.set()
        await abandoned_are(store, 0)


async def abandoned_are(store: StoreClient, number: int) -> None:
    """Wait until the runner reports it."""
    async with within():
        while ((await store.get_worker_by_id("w")).heartbeat_stats or {}).get("abandoned") != number:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_a_blocking_agent_that_hangs_is_abandoned_and_the_others_go_on(
    store: StoreClient, leave: threading.Event
) -> None:
    def agent(task: str) -> float:
        if task == "hang":
            leave.wait(8)
        return 1.0

    hanging = await enqueue(store, ["hang"] * 3, timeout_seconds=0.05)
    good = await enqueue(store, ["good"] * 10)
    async with serving(store, agent, 2, heartbeat_s=0.01):
        decided = await wait_and_read(store, hanging + good)
        await abandoned_are(store, 3)
        leave.set()
        await abandoned_are(store, 0)
    assert [rollout.attempt.status for rollout in decided] == ["timeout"] * 3 + ["succeeded"] * 10


async def test_a_runner_is_replaced_by_agents_that_hang_and_ends_the_others_first(
    store: StoreClient, leave: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HUNG_AGENTS", 3)
    inside, go_on = threading.Event(), threading.Event()

    def agent(task: str) -> float:
        if task == "hang":
            leave.wait(8)
        elif task == "slow":
            inside.set()
            go_on.wait(8)
        return 1.0

    slow = await enqueue(store, ["slow"])
    hanging = await enqueue(store, ["hang"] * 3, timeout_seconds=0.05)
    later = await enqueue(store, ["good"] * 3)
    runner = make_runner(store, agent, 2)
    task = asyncio.create_task(runner.serve())
    async with within():
        await store.wait_until_decided(rollout_ids=hanging)
        await until(inside.is_set)
        await asyncio.wait([task], timeout=0.05)
        assert not task.done()
        go_on.set()
        assert await task == "hung_agents"
    (first,) = await wait_and_read(store, slow)
    assert first.status == "succeeded"
    assert {rollout.status for rollout in await store.query_rollouts(rollout_id_in=later)} == {"queuing"}


async def test_a_runner_that_recovered_is_not_replaced(
    store: StoreClient, leave: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_HUNG_AGENTS", 2)

    def agent(task: str) -> float:
        if task == "hang":
            leave.wait(8)
        return 1.0

    async with serving(store, agent, 1, heartbeat_s=0.01) as task:
        await store.wait_until_decided(rollout_ids=await enqueue(store, ["hang"], timeout_seconds=0.05))
        await abandoned_are(store, 1)
        leave.set()
        await abandoned_are(store, 0)
        leave.clear()
        await store.wait_until_decided(rollout_ids=await enqueue(store, ["hang"], timeout_seconds=0.05))
        await store.wait_until_decided(rollout_ids=await enqueue(store, ["good"]))
        assert not task.done()
