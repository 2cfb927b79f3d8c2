"""The store with waiting, through its client, in this process."""

from __future__ import annotations

import asyncio

import pytest
from unit_helpers import make_generation, make_key, within

from raylight.errors import InvalidTransitionError, UnknownIdError
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.types import Failure, RolloutConfig, RolloutRequest, Span

LOST = Failure(kind="infrastructure", error="ConnectionError: gone")


@pytest.fixture
def store() -> StoreClient:
    return StoreClient(StoreService(clock=lambda: 1.0))


async def enqueue(store: StoreClient, count: int = 1, **config: object) -> list[str]:
    request = RolloutRequest(input="task", config=RolloutConfig(**config))
    return [r.rollout_id for r in await store.enqueue([request] * count)]


async def started(work: object) -> asyncio.Task:
    """A task that has run up to where it waits."""
    task = asyncio.ensure_future(work)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_a_waiting_dequeue_wakes_on_enqueue(store: StoreClient) -> None:
    async with within():
        waiting = await started(store.dequeue("w", 2, 60.0))
        ids = await enqueue(store)
        assert [r.rollout_id for r in await waiting] == ids


async def test_a_waiting_dequeue_wakes_on_requeue(store: StoreClient) -> None:
    async with within():
        await enqueue(store)
        first = (await store.dequeue("w", 1, 60.0))[0]
        waiting = await started(store.dequeue("v", 1, 60.0))
        await store.finish_attempt(first, "failed", LOST)
        again = (await waiting)[0]
        assert again.rollout_id == first.rollout_id
        assert again.attempt.sequence_id == 2


async def test_a_waiting_dequeue_wakes_when_a_lost_worker_is_released(store: StoreClient) -> None:
    async with within():
        ids = await enqueue(store, 2)
        await store.dequeue("lost", 2, 60.0)
        waiting = await started(store.dequeue("v", 2, 60.0))
        assert await store.release_worker("lost", "node died") == 2
        assert {r.rollout_id for r in await waiting} == set(ids)


async def test_a_poll_that_outlived_its_worker_takes_nothing_from_the_living(store: StoreClient) -> None:
    async with within():
        ids = await enqueue(store, 2)
        await store.dequeue("dead", 2, 60.0)
        outliving = await started(store.dequeue("dead", 2, 60.0))  # first in line
        living = await started(store.dequeue("living", 2, 60.0))
        await store.release_worker("dead", "killed")
        assert await outliving == []
        assert [r.rollout_id for r in await living] == ids


async def test_dequeue_gives_nothing_when_the_time_is_over(store: StoreClient) -> None:
    async with within():
        assert await store.dequeue("w", 1, 0.01) == []
        ids = await enqueue(store)  # and whoever gave up takes nothing with it
        assert [r.rollout_id for r in await store.dequeue("w", 1, 0.01)] == ids


async def test_a_cancelled_dequeue_takes_nothing_with_it(store: StoreClient) -> None:
    async with within():
        waiting = await started(store.dequeue("w", 1, 60.0))
        waiting.cancel()
        await asyncio.wait([waiting])
        ids = await enqueue(store)
        assert [r.rollout_id for r in await store.dequeue("v", 1, 60.0)] == ids


async def test_each_rollout_goes_to_one_of_many_waiting_workers(store: StoreClient) -> None:
    async with within():
        undone = {await started(store.dequeue(f"w{i}", 1, 60.0)) for i in range(8)}
        ids, taken = await enqueue(store, 5), []
        while len(taken) < 5:
            done, undone = await asyncio.wait(undone, return_when=asyncio.FIRST_COMPLETED)
            taken += [r.rollout_id for task in done for r in task.result()]
        assert sorted(taken) == sorted(ids)
        for task in undone:
            task.cancel()
        await asyncio.wait(undone)


async def test_wait_returns_once_enough_are_decided(store: StoreClient) -> None:
    async with within():
        ids = await enqueue(store, 3)
        waiting = await started(store.wait_for_rollouts(ids, at_least=2))
        for rollout in await store.dequeue("w", 2, 60.0):
            assert not waiting.done()
            await store.finish_attempt(rollout, "succeeded")
        assert [r.rollout_id for r in await waiting] == ids[:2]


async def test_wait_for_all_is_the_default_and_cancelled_ones_are_decided(store: StoreClient) -> None:
    async with within():
        ids = await enqueue(store, 2)
        waiting = await started(store.wait_for_rollouts(ids))
        await store.finish_attempt((await store.dequeue("w", 1, 60.0))[0], "succeeded")
        await store.cancel([ids[1]])
        assert [r.status for r in await waiting] == ["succeeded", "cancelled"]


async def test_wait_gives_what_is_decided_when_the_time_is_over(store: StoreClient) -> None:
    async with within():
        ids = await enqueue(store, 2)
        await store.finish_attempt((await store.dequeue("w", 1, 60.0))[0], "succeeded")
        assert [r.rollout_id for r in await store.wait_for_rollouts(ids, timeout=0.01)] == ids[:1]
        assert await store.wait_for_rollouts(ids[1:], timeout=0.0) == []


async def test_a_requeued_rollout_is_not_decided(store: StoreClient) -> None:
    async with within():
        ids = await enqueue(store, max_attempts=2)
        waiting = await started(store.wait_for_rollouts(ids))
        await store.finish_attempt((await store.dequeue("w", 1, 60.0))[0], "failed", LOST)
        assert await store.wait_for_rollouts(ids, timeout=0.0) == []
        assert not waiting.done()
        await store.finish_attempt((await store.dequeue("w", 1, 60.0))[0], "failed", LOST)
        assert [r.status for r in await waiting] == ["failed"]


async def test_wait_for_more_than_there_are_or_for_none_does_not_hang(store: StoreClient) -> None:
    async with within():
        ids = await enqueue(store)
        assert await store.wait_for_rollouts([]) == []
        assert await store.wait_for_rollouts(ids, at_least=0) == []
        await store.cancel(ids)
        assert len(await store.wait_for_rollouts(ids, at_least=99)) == 1


async def test_waiting_for_the_same_rollout_twice_does_not_hang(store: StoreClient) -> None:
    ids = await enqueue(store)
    waiting = await started(store.wait_for_rollouts([*ids, *ids]))
    await store.cancel(ids)
    async with within(1):
        assert {r.status for r in await waiting} == {"cancelled"}


async def test_finishing_waits_for_open_calls(store: StoreClient) -> None:
    async with within():
        await enqueue(store)
        rollout = (await store.dequeue("w", 1, 60.0))[0]
        key = make_key(rollout.rollout_id, rollout.attempt.attempt_id)
        await store.capture([key], [])
        reward = Span.of_rewards(rollout.attempt, {"reward": 0.5}, 0.0)
        finishing = await started(store.finish_attempt(rollout, "succeeded", None, [reward], timeout=60.0))
        await store.capture([], [(key, make_generation([1], [2], key=key))])
        assert (await finishing).status == "succeeded"
        found = (await store.collect([rollout.rollout_id]))[0]
        assert found.reward == 0.5
        assert [g.key for g in found.generations] == [key]


async def test_a_success_whose_calls_never_close_is_a_failure_of_the_infrastructure_and_retried(store: StoreClient) -> None:
    async with within():
        await enqueue(store, max_attempts=2)
        for sequence, expected in ((1, "requeuing"), (2, "failed")):
            rollout = (await store.dequeue("w", 1, 60.0))[0]
            assert rollout.attempt.sequence_id == sequence
            await store.capture([make_key(rollout.rollout_id, rollout.attempt.attempt_id)], [])
            reward = Span.of_rewards(rollout.attempt, {"reward": 1.0}, 0.0)
            decided = await store.finish_attempt(rollout, "succeeded", None, [reward], timeout=0.01)
            assert decided.status == expected
            assert decided.attempt.failure.kind == "infrastructure"
            assert "1 calls were not recorded within 0.01 s" in decided.attempt.failure.error


async def test_a_failure_keeps_its_reason_when_calls_never_close(store: StoreClient) -> None:
    async with within():
        await enqueue(store)
        rollout = (await store.dequeue("w", 1, 60.0))[0]
        await store.capture([make_key(rollout.rollout_id, rollout.attempt.attempt_id)], [])
        failure = Failure(kind="agent", error="ValueError: no")
        decided = await store.finish_attempt(rollout, "failed", failure, timeout=0.01)
        assert (decided.status, decided.attempt.failure) == ("failed", failure)


async def test_a_late_record_is_counted_and_kept_out_of_the_next_attempt(store: StoreClient) -> None:
    async with within():
        await enqueue(store)
        first = (await store.dequeue("w", 1, 60.0))[0]
        key = make_key(first.rollout_id, first.attempt.attempt_id)
        await store.capture([key], [])
        await store.release_worker("w", "died")
        second = (await store.dequeue("v", 1, 60.0))[0]
        await store.capture([], [(key, make_generation([1], [2], key=key))])
        await store.finish_attempt(second, "succeeded")
        assert (await store.collect([first.rollout_id]))[0].generations == []
        assert (await store.statistics())["generations_late"] == 1


async def test_a_stale_attempt_cannot_decide(store: StoreClient) -> None:
    async with within():
        await enqueue(store)
        first = (await store.dequeue("w", 1, 60.0))[0]
        await store.release_worker("w", "died")
        await store.dequeue("v", 1, 60.0)
        with pytest.raises(UnknownIdError, match="not the latest"):
            await store.finish_attempt(first, "succeeded")


async def test_an_attempt_is_decided_once(store: StoreClient) -> None:
    async with within():
        await enqueue(store)
        rollout = (await store.dequeue("w", 1, 60.0))[0]
        await store.finish_attempt(rollout, "succeeded")
        with pytest.raises(InvalidTransitionError, match="succeeded -> failed"):
            await store.finish_attempt(rollout, "failed", LOST)


@pytest.mark.parametrize("ask", [
    lambda s: s.wait_for_rollouts(["ro-none"]), lambda s: s.collect(["ro-none"]), lambda s: s.cancel(["ro-none"]),
    lambda s: s.get_resources("rs-none"),
], ids=["wait", "collect", "cancel", "resources"])  # fmt: skip
async def test_an_unknown_id_is_a_typed_error(store: StoreClient, ask: object) -> None:
    with pytest.raises(UnknownIdError, match="none"):
        await ask(store)
