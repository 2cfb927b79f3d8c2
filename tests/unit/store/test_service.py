"""The store's waiting: long polls, backpressure, and its timer."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from store_helpers import BROKEN, Box, begun, call_of, ids_of, open_box, span_of
from unit_helpers import make_generation, within

from raylight.config import StoreConfig
from raylight.errors import StoreError, WorkerGoneError
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.types import EnqueueRolloutRequest, RolloutConfig


@pytest.fixture
async def box() -> AsyncIterator[Box]:
    async with open_box(max_queued=5) as box:
        yield box


# long polls


async def test_a_waiting_dequeue_wakes_on_enqueue(box: Box) -> None:
    async with within():
        waiting = await begun(box.store.dequeue_many_rollouts(limit=2, worker_id="w", timeout=60))
        ids = await box.enqueue()
        assert [rollout.rollout_id for rollout in await waiting] == ids


async def test_waiting_workers_share_what_is_enqueued(box: Box) -> None:
    async with within():
        gone = await begun(box.store.dequeue_many_rollouts(limit=8, worker_id="gone", timeout=60))
        gone.cancel()
        polls = [
            await begun(box.store.dequeue_many_rollouts(limit=8, worker_id=name, timeout=60))
            for name in ("v", "w")
        ]
        requests = [EnqueueRolloutRequest(input=i) for i in range(5)]
        await box.store.enqueue_many_rollouts(requests)
        assert sorted([len(await poll) for poll in polls]) == [2, 3]
        await box.store.enqueue_many_rollouts(requests[:4])
        alone = await box.store.dequeue_many_rollouts(limit=8, worker_id="v", timeout=60)
        assert len(alone) == 4


@pytest.mark.parametrize("why", ["failed", "released", "expired", "by hand"])
async def test_a_waiting_dequeue_wakes_on_requeue(box: Box, why: str) -> None:
    async with within():
        first = await box.take(max_attempts=2, retry_condition={"failed"})
        waiting = await begun(box.store.dequeue_rollout("v", timeout=60))
        match why:
            case "failed":
                await box.store.finish_attempt(first, "failed", BROKEN)
            case "released":
                await box.store.release_worker("w", "died")
            case "expired":
                await box.pass_time(60)
            case "by hand":
                await box.store.update_rollout(first.rollout_id, status="requeuing")
        again = await waiting
        assert (again.rollout_id, again.attempt.sequence_id) == (first.rollout_id, 2)


async def test_dequeue_gives_nothing_when_the_time_is_over(box: Box) -> None:
    async with within():
        for timeout in (0.01, 0, -1):
            assert await box.store.dequeue_rollout("w", timeout=timeout) is None
        ids = await box.enqueue()  # a waiter that gave up takes no rollout
        assert (await box.again()).rollout_id == ids[0]


async def test_a_cancelled_dequeue_takes_nothing_with_it(box: Box) -> None:
    async with within():
        waiting = await begun(box.store.dequeue_rollout("w", timeout=60))
        waiting.cancel()
        await asyncio.wait([waiting])
        ids = await box.enqueue()
        assert (await box.store.dequeue_rollout("v", timeout=60)).rollout_id == ids[0]


async def test_each_rollout_goes_to_the_worker_that_waits_longest(box: Box) -> None:
    async with within():
        waiting = [await begun(box.store.dequeue_rollout(f"w{i}", timeout=60)) for i in range(8)]
        ids = [
            rollout.rollout_id
            for rollout in await box.store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1)] * 5)
        ]
        taken = await asyncio.gather(*waiting[:5])
        assert [(rollout.rollout_id, rollout.attempt.worker_id) for rollout in taken] == [
            (rollout_id, f"w{i}") for i, rollout_id in enumerate(ids)
        ]
        ids = await box.enqueue(3)
        assert [rollout.rollout_id for rollout in await asyncio.gather(*waiting[5:])] == ids


async def test_a_poll_that_outlives_its_worker_takes_nothing_from_the_living(box: Box) -> None:
    async with within():
        first = await box.take("dead")
        outliving = await begun(box.store.dequeue_rollout("dead", timeout=60))
        living = await begun(box.store.dequeue_rollout("living", timeout=60))
        await box.store.release_worker("dead", "killed")
        with pytest.raises(WorkerGoneError, match="released dead"):
            await outliving
        assert (await living).rollout_id == first.rollout_id


async def test_a_dequeue_that_is_asked_again_gives_the_same_again(box: Box) -> None:
    ids = await box.enqueue(4)
    await box.store.update_rollout(ids[0], status="failed")
    await box.store.update_rollout(
        ids[0], status="requeuing"
    )  # so that the queue is not in the order of the rollouts
    first = await box.service.dequeue("w", 3, 0, "request")
    async with within():
        assert await box.service.dequeue("w", 3, 60, "request") == first
    assert [row[0] for row in first] == ids[1:]
    assert [row[0] for row in await box.service.dequeue("w", 3, 0, "another")] == ids[:1]
    async with within():
        assert await box.service.dequeue("w", 3, 60, "request") == first
    assert await box.count("total_attempts") == 4


async def test_a_dequeue_that_is_asked_again_too_late_does_not_take_from_another(box: Box) -> None:
    await box.enqueue()
    await box.service.dequeue("w", 1, 0, "request")
    await box.pass_time(60)
    second = await box.again("v")
    assert await box.service.dequeue("w", 1, 0, "request") == []
    (fresh,) = await box.enqueue()
    assert [row[0] for row in await box.service.dequeue("w", 1, 0, "request")] == [fresh]
    assert (await box.store.get_latest_attempt(second.rollout_id)).worker_id == "v"


async def test_a_poll_ends_with_its_worker_though_nothing_waits(box: Box) -> None:
    async with within():
        outliving = [await begun(box.store.dequeue_rollout("dead", timeout=60)) for _ in range(2)]
        living = await begun(box.store.dequeue_rollout("living", timeout=60))
        nobody = await begun(box.store.dequeue_rollout(None, timeout=60))
        await box.store.release_worker("dead", "killed")
        for poll in outliving:
            with pytest.raises(WorkerGoneError):
                await poll
        ids = await box.enqueue(2)
        assert [(await poll).rollout_id for poll in (living, nobody)] == ids


# backpressure


async def test_a_full_queue_makes_the_producer_wait(box: Box) -> None:
    async with within():
        requests = [EnqueueRolloutRequest(input=i) for i in range(12)]
        producing = await begun(box.store.enqueue_many_rollouts(requests))
        assert await box.count("rollouts_queuing") == 5
        taken = await box.store.dequeue_many_rollouts(limit=3)
        for _ in range(20):
            await asyncio.sleep(0)
        assert await box.count("total_rollouts") == 8
        assert not producing.done()
        while len(taken) < 12:
            taken += await box.store.dequeue_many_rollouts(limit=5, timeout=60)
        assert [rollout.input for rollout in taken] == list(range(12))
        assert [rollout.input for rollout in await producing] == list(range(12))


@pytest.mark.parametrize("room", ["dequeue", "cancel", "start_attempt", "by hand"])
async def test_the_producer_goes_on_when_a_rollout_leaves_the_queue(box: Box, room: str) -> None:
    async with within():
        ids = await box.enqueue(5)
        producing = await begun(box.store.enqueue_rollout(1))
        match room:
            case "dequeue":
                await box.store.dequeue_rollout()
            case "cancel":
                await box.store.cancel_rollout(ids[2])
            case "start_attempt":
                await box.store.start_attempt(ids[2])
            case "by hand":
                await box.store.update_rollout(ids[2], status="failed")
        assert (await producing).status == "queuing"


async def test_a_producer_that_is_cancelled_while_it_waits_enqueues_no_more(box: Box) -> None:
    async with within():
        await box.enqueue(4)
        producing = await begun(box.store.enqueue_many_rollouts([EnqueueRolloutRequest(input=9)] * 3))
        producing.cancel()
        await asyncio.wait([producing])
        assert len(await box.store.dequeue_many_rollouts(limit=9)) == 5
        assert await box.count("total_rollouts") == 5


async def test_producers_wait_in_line(box: Box) -> None:
    async with within():
        await box.enqueue(5)
        producing = [await begun(box.store.enqueue_rollout(f"p{i}")) for i in range(4)]
        await box.store.dequeue_many_rollouts(limit=5)
        await asyncio.gather(*producing)
        assert [rollout.input for rollout in await box.store.dequeue_many_rollouts(limit=5)] == [
            "p0",
            "p1",
            "p2",
            "p3",
        ]


# the timer


async def test_time_ends_attempts_without_anybody_calling() -> None:
    service = StoreService(None, StoreConfig(lease_s=0.05))
    store = StoreClient(service)
    async with within():
        started = time.monotonic()
        leased = await store.enqueue_rollout(1, config=RolloutConfig(infrastructure_retries=0))
        limited = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=0.02))
        await store.dequeue_rollout("w")
        ids = await store.wait_until_decided(rollout_ids=[leased.rollout_id, limited.rollout_id])
        assert time.monotonic() - started > 0.03
        found = await store.get_rollout_states(ids)
    assert [(rollout.status, rollout.attempt.status) for rollout in found] == [
        ("failed", "unresponsive"),
        ("failed", "timeout"),
    ]
    assert [rollout.attempt.failure.kind for rollout in found] == ["infrastructure", "timeout"]
    await service.close()


async def test_an_earlier_deadline_is_not_missed_behind_a_later_one() -> None:
    service = StoreService(None, StoreConfig(lease_s=1e6))
    store = StoreClient(service)
    async with within():
        await store.enqueue_rollout(1)
        await store.dequeue_rollout("w")
        await asyncio.sleep(0.01)
        first = await store.start_rollout(1, config=RolloutConfig(timeout_seconds=0.02))
        assert len(await store.wait_until_decided(rollout_ids=[first.rollout_id])) == 1
    await service.close()


async def test_a_failure_of_the_timer_is_told_once_and_the_store_goes_on(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with within():
        rollout = await box.store.start_rollout(1)
        waiting = await begun(box.store.wait_until_decided(rollout_ids=[rollout.rollout_id]))

        def fail() -> int:
            raise StoreError("the disk is full")

        with monkeypatch.context() as patch:
            patch.setattr(box.service._leases, "expire", fail)
            limited = await box.store.start_rollout(1, config=RolloutConfig(timeout_seconds=1e-9))
            with pytest.raises(StoreError, match="the disk is full"):
                await waiting
        assert await box.status(limited) == ("preparing", "preparing")
        box.clock.now += 1  # and a new timer does what the old one could not
        assert len(await box.store.wait_until_decided(rollout_ids=[limited.rollout_id])) == 1
        assert await box.status(limited) == ("failed", "timeout")


# closing


async def test_whoever_waits_when_the_store_is_closed_hears_of_it() -> None:
    async with open_box(max_queued=1) as box, within():
        rollout = await box.take()
        await box.store.capture([(call_of(rollout), 0.0)], [])
        waiting = [
            await begun(box.store.wait_until_decided(rollout_ids=[rollout.rollout_id])),
            await begun(box.store.dequeue_rollout("w", timeout=60)),
            await begun(box.store.finish_attempt(rollout, "succeeded", timeout=60)),
        ]
        await box.service.close()
        for task in waiting:
            with pytest.raises(StoreError, match="closed"):
                await task
        for work in (
            box.store.lease_s(),
            box.store.statistics(),
            box.store.query_rollouts(),
            box.store.enqueue_rollout(1),
            box.store.dequeue_rollout(),
        ):
            with pytest.raises(StoreError, match="is closed"):
                await work
        await box.service.close()


def test_a_store_lives_longer_than_an_event_loop() -> None:
    service = StoreService()
    store = StoreClient(service)
    first = asyncio.run(store.enqueue_rollout(1))
    assert asyncio.run(store.dequeue_rollout("w", timeout=1)).rollout_id == first.rollout_id
    assert len(asyncio.run(store.query_rollouts())) == 1
    asyncio.run(service.close())


# memory


def held(thing: Any) -> int:
    """Entries of the containers of a service and its parts."""
    parts = [thing] + [
        part for name, part in vars(thing).items() if type(part).__module__.startswith("raylight.store")
    ]
    containers = [
        value for part in parts for value in vars(part).values() if isinstance(value, dict | list | set)
    ]
    signals = [value._waiters for value in vars(thing).values() if hasattr(value, "_waiters")]
    return sum(len(container) for container in containers + signals)


async def test_nothing_of_a_finished_rollout_stays_in_memory(box: Box) -> None:
    await box.store.heartbeat("w0", {}, [])  # the client is known from its first message on
    before = 0
    for i in range(33):
        if i == 3:
            before = held(box.service)  # with the names of the counters
        rollout = await box.take(f"w{i % 3}", max_attempts=2, retry_condition={"failed"})
        waiting = await begun(box.store.wait_until_decided(rollout_ids=[rollout.rollout_id]))
        key = call_of(rollout)
        await box.store.capture([(key, 0.0)], [(key, make_generation([1], [2], key=key), span_of(rollout))])
        if i % 3:
            await box.store.finish_attempt(rollout, "failed", BROKEN)
            rollout = await box.again()
        await box.store.heartbeat("w0", {}, [ids_of(rollout)[1]])
        await box.store.finish_attempt(rollout, "succeeded", None, [span_of(rollout)])
        await waiting
    for _ in range(5):
        await asyncio.sleep(0)
    assert held(box.service) <= before + 1, "the timer's own wait"
    events = box.service._rollouts.events
    assert (events.decided, events.queued, events.dequeued, events.calls_closed, events.deadline) == (
        set(),
        False,
        False,
        False,
        None,
    )
