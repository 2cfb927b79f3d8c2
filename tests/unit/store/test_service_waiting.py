"""Waiting for rollouts to be decided."""

import asyncio
import re
from typing import Any

import pytest
from store_helpers import BROKEN, Box, begun
from unit_helpers import within

from raylight.errors import UnknownIdError


async def decide(box: Box) -> str:
    rollout = await box.again()
    return (await box.store.finish_attempt(rollout, "succeeded")).rollout_id


async def test_wait_returns_once_enough_are_decided_in_the_order_asked(box: Box) -> None:
    async with within():
        ids = await box.enqueue(4)
        waiting = await begun(box.store.wait_until_decided(rollout_ids=ids[::-1], at_least=2))
        all_of_them = await begun(box.store.wait_until_decided(rollout_ids=ids, timeout=60))
        await decide(box)
        assert not waiting.done()
        await decide(box)
        assert await waiting == [ids[1], ids[0]]
        await box.store.cancel_rollout(ids[3])
        assert not all_of_them.done()
        await decide(box)
        assert await all_of_them == ids
        states = await box.store.get_rollout_states(ids)
        assert [state.status for state in states] == ["succeeded"] * 3 + ["cancelled"]


async def test_wait_for_rollouts_returns_the_decided_ones_in_the_order_asked(box: Box) -> None:
    async with within():
        ids = await box.enqueue(3)
        assert await box.store.wait_for_rollouts(rollout_ids=ids, timeout=0) == []
        for _ in range(2):
            await decide(box)
        rollouts = await box.store.wait_for_rollouts(rollout_ids=ids[::-1], timeout=0)
        assert [(rollout.rollout_id, rollout.status) for rollout in rollouts] == [
            (rollout_id, "succeeded") for rollout_id in ids[1::-1]
        ]
        assert rollouts == (await box.store.query_rollouts(rollout_id_in=ids[:2]))[::-1]
        waiting = await begun(box.store.wait_for_rollouts(rollout_ids=ids))
        await box.store.cancel_rollout(ids[2])
        assert [rollout.status for rollout in await waiting] == ["succeeded", "succeeded", "cancelled"]


@pytest.mark.parametrize("timeout", [0, 0.01, -1.0])
async def test_wait_gives_what_is_decided_when_the_time_is_over(box: Box, timeout: float) -> None:
    async with within():
        ids = await box.enqueue(2)
        assert await box.store.wait_until_decided(rollout_ids=ids, timeout=timeout) == []
        await decide(box)
        assert await box.store.wait_until_decided(rollout_ids=ids, timeout=timeout) == ids[:1]


@pytest.mark.parametrize("timeout", [None, 60, 1e9, float("inf")])
async def test_wait_with_any_timeout(box: Box, timeout: float | None) -> None:
    async with within():
        ids = await box.enqueue()
        waiting = await begun(box.store.wait_until_decided(rollout_ids=ids, timeout=timeout))
        await decide(box)
        assert len(await waiting) == 1


@pytest.mark.parametrize(
    ("ids", "at_least"), [([], None), ([], 3), (["a"], 0), (["a"], -1), (["b"], 99), (["b", "b"], 2)]
)
async def test_wait_for_nothing_or_for_more_than_there_are_does_not_hang(
    box: Box, ids: list[str], at_least: int | None
) -> None:
    await box.store.enqueue_rollout(1, rollout_id="b")
    await decide(box)
    await box.store.enqueue_rollout(1, rollout_id="a")
    async with within():
        found = await box.store.wait_until_decided(rollout_ids=ids, at_least=at_least)
    assert found == [i for i in dict.fromkeys(ids) if i == "b"]


async def test_waiting_for_the_same_rollout_twice_does_not_hang(box: Box) -> None:
    ids = await box.enqueue()
    waiting = await begun(box.store.wait_until_decided(rollout_ids=ids * 3))
    await box.store.cancel_rollouts(ids)
    async with within():
        assert await waiting == ids


async def test_a_rollout_that_is_tried_again_is_not_decided(box: Box) -> None:
    async with within():
        first = await box.take(max_attempts=2, retry_condition={"failed"})
        waiting = await begun(box.store.wait_until_decided(rollout_ids=[first.rollout_id]))
        await box.store.finish_attempt(first, "failed", BROKEN)
        assert await box.store.wait_until_decided(rollout_ids=[first.rollout_id], timeout=0) == []
        assert not waiting.done()
        await box.store.finish_attempt(await box.again(), "failed", BROKEN)
        assert await waiting == [first.rollout_id]


async def test_a_decision_that_is_taken_back_is_waited_for_again(box: Box) -> None:
    async with within():
        ids = await box.enqueue(2)
        waiting = await begun(box.store.wait_until_decided(rollout_ids=ids))
        await decide(box)
        await box.store.update_rollout(ids[0], status="requeuing")
        await decide(box)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        await decide(box)
        assert await waiting == ids


@pytest.mark.parametrize("unknown", ["ro-none", "", "\ud800", "ro\0", None])
async def test_an_unknown_rollout_is_not_waited_for(box: Box, unknown: Any) -> None:
    await box.store.enqueue_rollout(1, rollout_id="ro")
    async with within():
        with pytest.raises(UnknownIdError, match=re.escape(repr(unknown))):
            await box.store.wait_until_decided(rollout_ids=["ro", unknown])


async def test_who_waits_for_many_asks_in_one_statement(box: Box) -> None:
    ids = [(await box.store.start_rollout(i)).rollout_id for i in range(50)]
    statements: list[str] = []
    box.service._journal.db.set_trace_callback(statements.append)
    assert await box.store.wait_until_decided(rollout_ids=ids, timeout=0) == []
    assert box.service._rollouts.undecided(ids) == ids
    assert len(statements) == 2


async def test_many_wait_and_those_who_go_leave_nothing_behind(box: Box) -> None:
    async with within():
        ids = await box.enqueue(5)
        waiting = [
            await begun(box.store.wait_until_decided(rollout_ids=ids[i % 5 :], at_least=1)) for i in range(50)
        ]
        gone = [await begun(box.store.wait_until_decided(rollout_ids=ids)) for _ in range(5)]
        for task in gone:
            task.cancel()
        await asyncio.wait(gone)
        assert await box.store.wait_until_decided(rollout_ids=ids, timeout=0.01) == []
        assert sum(len(waiters) for waiters in box.service._waiters._waiters.values()) == sum(
            5 - i % 5 for i in range(50)
        )
        for _ in ids:
            await decide(box)
        assert all(len(found) >= 1 for found in await asyncio.gather(*waiting))
        assert box.service._waiters._waiters == {}
