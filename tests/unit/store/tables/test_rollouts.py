"""Rollouts of the store: enqueued once, given out oldest first, changed by the tables."""

from typing import Any

import pytest
from pydantic import ValidationError
from store_helpers import BROKEN, Box, Clock, ids_of, open_box, span_of

from raylight.errors import InvalidTransitionError, UnknownIdError
from raylight.store.tables.transitions import MANUAL_TRANSITIONS
from raylight.types import FINISHED, EnqueueRolloutRequest, Rollout, RolloutConfig

# enqueueing


async def test_a_rollout_comes_back_as_it_was_given(box: Box) -> None:
    config = RolloutConfig(
        timeout_seconds=5, unresponsive_seconds=2, max_attempts=3, retry_condition={"failed", "timeout"}
    )
    task = {"question": "ä\ud800\0", "n": (1, [2.5, None])}
    given = await box.store.enqueue_rollout(
        task, mode="val", config=config, metadata={"k": {1, 2}}, rollout_id="mine"
    )
    assert given == await box.store.get_rollout_by_id("mine")
    assert (given.input, given.mode, given.config, given.metadata) == (task, "val", config, {"k": {1, 2}})
    assert (given.status, given.attempt, given.start_time, given.end_time) == ("queuing", None, 1000.0, None)
    assert (given.resources_id, given.resources_version, given.group_id) == (None, None, None)


async def test_what_a_rollout_was_made_of_may_change_afterwards(box: Box) -> None:
    task, metadata = {"a": [1]}, {"b": [2]}
    rollout = await box.store.enqueue_rollout(task, metadata=metadata)
    task["a"].append(9)
    metadata["b"].append(9)
    rollout.metadata["b"].append(10)
    found = await box.store.get_rollout_by_id(rollout.rollout_id)
    assert (found.input, found.metadata) == ({"a": [1]}, {"b": [2]})


async def test_many_are_enqueued_in_the_order_given(box: Box) -> None:
    requests = [
        EnqueueRolloutRequest(input=i, group_id=f"g{i % 2}") for i in range(1200)
    ]  # more than one message holds
    given = await box.store.enqueue_many_rollouts(requests)
    assert [rollout.input for rollout in given] == list(range(1200))
    assert [rollout.group_id for rollout in given[:3]] == ["g0", "g1", "g0"]
    taken = await box.store.dequeue_many_rollouts(limit=1200)
    assert [rollout.rollout_id for rollout in taken] == [rollout.rollout_id for rollout in given]
    assert await box.store.enqueue_many_rollouts([]) == []


async def test_an_id_of_ones_own_is_enqueued_once(box: Box) -> None:
    first = await box.store.enqueue_rollout("a", rollout_id='it\'s "mine" ; --')
    box.clock.now += 1
    again, other = await box.store.enqueue_many_rollouts(
        [
            EnqueueRolloutRequest(input="b", rollout_id=first.rollout_id),
            EnqueueRolloutRequest(input="c", rollout_id="x"),
        ]
    )
    assert again == first
    assert await box.count("total_rollouts") == 2
    taken = await box.again()
    await box.store.finish_attempt(taken, "succeeded")
    assert (await box.store.enqueue_rollout("a", rollout_id=first.rollout_id)).status == "succeeded"
    assert (await box.again()).rollout_id == other.rollout_id
    assert await box.store.dequeue_rollout() is None


async def test_the_same_id_twice_in_one_request(box: Box) -> None:
    twice = [EnqueueRolloutRequest(input=i, rollout_id="same") for i in range(2)]
    assert [rollout.input for rollout in await box.store.enqueue_many_rollouts(twice)] == [0, 0]
    assert await box.count("total_rollouts") == 1


async def test_the_latest_resources_are_taken_unless_some_are_named(box: Box) -> None:
    old = await box.store.add_resources({"llm": 1})
    new = await box.store.add_resources({"llm": 2})
    latest = await box.store.enqueue_rollout(1)
    named = await box.store.enqueue_rollout(1, resources_id=old.resources_id)
    assert [latest.resources_id, named.resources_id] == [new.resources_id, old.resources_id]
    await box.store.update_resources(old.resources_id, {"llm": 3})
    assert (await box.store.get_rollout_by_id(named.rollout_id)).resources_version == 2
    assert (await box.store.enqueue_rollout(1)).resources_id == old.resources_id


async def test_unknown_resources_queue_none_of_the_rollouts() -> None:
    async with open_box(max_queued=1) as box:
        requests = [EnqueueRolloutRequest(input=1), EnqueueRolloutRequest(input=1, resources_id="rs-none")]
        with pytest.raises(UnknownIdError, match="rs-none"):
            await box.store.enqueue_many_rollouts(requests)
        assert await box.counts() == {}


@pytest.mark.parametrize("bad", [{"mode": "eval"}, {"metadata": [1]}, {"rollout_id": 5}])
async def test_a_wrong_request_is_refused(box: Box, bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        await box.store.enqueue_rollout(1, **bad)
    assert await box.counts() == {}


# the queue


async def test_rollouts_are_given_out_oldest_first_and_once(box: Box) -> None:
    ids = await box.enqueue(5)
    first = await box.store.dequeue_many_rollouts(limit=2, worker_id="a")
    second = await box.store.dequeue_many_rollouts(limit=2, worker_id="b")
    third = await box.store.dequeue_many_rollouts(limit=9)
    assert [rollout.rollout_id for rollout in first + second + third] == ids
    assert [rollout.attempt.worker_id for rollout in first + second + third] == ["a", "a", "b", "b", None]
    assert {
        (rollout.status, rollout.attempt.status, rollout.attempt.sequence_id) for rollout in first + second
    } == {("preparing", "preparing", 1)}
    assert await box.store.dequeue_many_rollouts(limit=9) == []


@pytest.mark.parametrize("limit", [0, -3])
async def test_a_limit_below_one_takes_nothing(box: Box, limit: int) -> None:
    await box.enqueue()
    assert await box.store.dequeue_many_rollouts(limit=limit) == []
    assert await box.count("rollouts_queuing") == 1


async def test_a_requeued_rollout_goes_to_the_end_of_the_queue(box: Box) -> None:
    first = await box.take(max_attempts=2, retry_condition={"failed"})
    (second,) = await box.enqueue()
    await box.store.finish_attempt(first, "failed", BROKEN)
    taken = await box.store.dequeue_many_rollouts(limit=9)
    assert [rollout.rollout_id for rollout in taken] == [second, first.rollout_id]
    assert [rollout.attempt.sequence_id for rollout in taken] == [1, 2]


async def test_the_order_of_the_queue_outlives_the_store(tmp_path: Any) -> None:
    clock = Clock()
    async with open_box(tmp_path / "s.db", clock) as box:
        first = await box.take()
        ids = await box.enqueue(3)
        await box.store.finish_attempt(first, "failed", BROKEN)
        await box.store.update_rollout(first.rollout_id, status="requeuing")
    async with open_box(tmp_path / "s.db", clock) as box:
        ids += [first.rollout_id, *await box.enqueue(2)]
        assert [rollout.rollout_id for rollout in await box.store.dequeue_many_rollouts(limit=9)] == ids


# beginning by hand


async def test_a_started_rollout_is_never_in_the_queue(box: Box) -> None:
    update = await box.store.add_resources({"llm": 1})
    rollout = await box.store.start_rollout(
        {"t": 1}, mode="train", metadata={"a": 1}, worker_id="me", rollout_id="ro-1"
    )
    assert await box.store.dequeue_rollout() is None
    assert (rollout.rollout_id, rollout.status, rollout.resources_id) == (
        "ro-1",
        "preparing",
        update.resources_id,
    )
    assert (rollout.attempt.sequence_id, rollout.attempt.status, rollout.attempt.worker_id) == (
        1,
        "preparing",
        "me",
    )
    assert (await box.store.finish_attempt(rollout, "succeeded")).status == "succeeded"


async def test_a_rollout_is_started_once(box: Box) -> None:
    await box.store.start_rollout(1, rollout_id="ro-1")
    await box.store.enqueue_rollout(1, rollout_id="ro-2")
    for there in ("ro-1", "ro-2"):
        with pytest.raises(InvalidTransitionError, match="start_attempt"):
            await box.store.start_rollout(1, rollout_id=there)
    with pytest.raises(UnknownIdError, match="rs-none"):
        await box.store.start_rollout(1, resources_id="rs-none")
    assert await box.count("total_attempts") == 1


# changing by hand


async def test_what_is_not_given_stays_and_none_is_a_value(box: Box) -> None:
    update = await box.store.add_resources({"llm": 1})
    rollout = await box.store.enqueue_rollout(
        "a", mode="train", config=RolloutConfig(max_attempts=2), metadata={"k": 1}
    )

    async def change(**values: Any) -> Rollout:
        state = await box.store.update_rollout(rollout.rollout_id, **values)
        changed = await box.store.get_rollout_by_id(rollout.rollout_id)
        assert dict(state) == {name: getattr(changed, name) for name in dict(state)}
        return changed

    assert await change() == rollout
    changed = await change(input=None, mode=None, resources_id=None, metadata=None)
    assert (changed.input, changed.mode, changed.resources_id, changed.metadata) == (None, None, None, {})
    assert (changed.config.max_attempts, changed.status) == (2, "queuing")
    changed = await change(
        input=[1],
        mode="test",
        resources_id=update.resources_id,
        config=RolloutConfig(),
        metadata={"n": 2},
    )
    assert (changed.input, changed.mode, changed.resources_id, changed.metadata) == (
        [1],
        "test",
        update.resources_id,
        {"n": 2},
    )
    assert changed.config == RolloutConfig()
    assert changed == await box.store.get_rollout_by_id(rollout.rollout_id)


async def test_a_wrong_change_changes_nothing(box: Box) -> None:
    (rollout_id,) = await box.enqueue()
    before = await box.store.get_rollout_by_id(rollout_id)
    with pytest.raises(UnknownIdError, match="rs-none"):
        await box.store.update_rollout(rollout_id, mode="val", resources_id="rs-none")
    with pytest.raises(InvalidTransitionError, match="queuing -> running"):
        await box.store.update_rollout(rollout_id, mode="val", status="running")
    for status in (None, "done"):
        with pytest.raises(InvalidTransitionError):
            await box.store.update_rollout(rollout_id, mode="val", status=status)
    with pytest.raises(ValidationError):
        await box.store.update_rollout(rollout_id, mode="eval")
    with pytest.raises(ValidationError):
        await box.store.update_rollout(rollout_id, metadata="m")
    with pytest.raises(UnknownIdError, match="ro-none"):
        await box.store.update_rollout("ro-none", mode="val")
    assert await box.store.get_rollout_by_id(rollout_id) == before


async def bring_to(box: Box, status: str) -> str:
    """A rollout in this status."""
    if status == "queuing":
        return (await box.enqueue())[0]
    rollout = await box.take(max_attempts=2, retry_condition={"failed"} if status == "requeuing" else set())
    if status == "running":
        await box.store.add_span(span_of(rollout))
    elif status == "succeeded":
        await box.store.finish_attempt(rollout, "succeeded")
    elif status in ("failed", "requeuing"):
        await box.store.finish_attempt(rollout, "failed", BROKEN)
    elif status == "cancelled":
        await box.store.cancel_rollout(rollout.rollout_id)
    return rollout.rollout_id


@pytest.mark.parametrize("after", sorted(MANUAL_TRANSITIONS))
@pytest.mark.parametrize("before", sorted(MANUAL_TRANSITIONS))
async def test_the_status_changes_by_hand_as_the_table_says(box: Box, before: str, after: str) -> None:
    rollout_id = await bring_to(box, before)
    assert (await box.status(rollout_id))[0] == before
    if after not in MANUAL_TRANSITIONS[before] and after != before:
        with pytest.raises(InvalidTransitionError, match=f"{before} -> {after}"):
            await box.store.update_rollout(rollout_id, status=after)
        after = before
    else:
        assert (await box.store.update_rollout(rollout_id, status=after)).status == after
    found = await box.store.get_rollout_by_id(rollout_id)
    assert (found.status, found.end_time) == (after, box.clock.now if after in FINISHED else None)
    assert await box.store.statistics() | {f"rollouts_{after}": 1} == await box.store.statistics()
    assert sum(n for name, n in (await box.store.statistics()).items() if name.startswith("rollouts_")) == 1
    taken = await box.store.dequeue_many_rollouts(limit=9)
    assert [rollout.rollout_id for rollout in taken] == (
        [rollout_id] if after in ("queuing", "requeuing") else []
    )


async def test_a_finished_rollout_is_run_again_by_hand(box: Box) -> None:
    first = await box.take()
    await box.store.finish_attempt(first, "succeeded")
    requeued = await box.store.update_rollout(first.rollout_id, status="requeuing")
    assert (requeued.end_time, requeued.attempt.status) == (None, "succeeded")
    assert await box.store.wait_until_decided(rollout_ids=[first.rollout_id], timeout=0) == []
    second = await box.again()
    assert (second.rollout_id, second.attempt.sequence_id) == (first.rollout_id, 2)
    assert (await box.store.finish_attempt(second, "failed", BROKEN)).status == "failed"


@pytest.mark.parametrize("by_hand", ["succeeded", "failed"])
@pytest.mark.parametrize("end", ["succeeded", "failed", "timeout", "span", "released"])
async def test_what_was_decided_by_hand_stays_whatever_its_attempt_still_does(
    box: Box, by_hand: str, end: str
) -> None:
    rollout = await box.take(timeout_seconds=5, max_attempts=3, retry_condition={"failed", "timeout"})
    await box.store.update_rollout(rollout.rollout_id, status=by_hand)
    assert await box.store.heartbeat("w", {}, [ids_of(rollout)[1]]) == [ids_of(rollout)[1]]
    if end == "span":
        await box.store.add_span(span_of(rollout))
    elif end == "timeout":
        assert await box.pass_time(5) == 1
    elif end == "released":
        assert await box.store.release_worker("w", "died") == 1
    else:
        await box.store.finish_attempt(rollout, end, BROKEN if end == "failed" else None)
    assert (await box.status(rollout))[0] == by_hand
    assert await box.store.dequeue_rollout() is None


@pytest.mark.parametrize("begun", [False, True])
async def test_a_rollout_queued_again_by_hand_while_it_runs(box: Box, begun: bool) -> None:
    first = await box.take(timeout_seconds=5)
    if begun:
        await box.store.add_span(span_of(first))
    await box.store.update_rollout(first.rollout_id, status="requeuing")
    await box.store.add_span(span_of(first))
    assert await box.pass_time(5) == 1  # and the end of its attempt takes nothing out of the queue
    assert await box.status(first) == ("requeuing", "timeout")
    assert (await box.again()).attempt.sequence_id == 2


async def test_an_attempt_that_succeeds_after_all_saves_the_second(box: Box) -> None:
    first = await box.take()
    await box.store.update_rollout(first.rollout_id, status="requeuing")
    assert (await box.store.finish_attempt(first, "succeeded")).status == "succeeded"
    assert await box.store.dequeue_rollout() is None


# cancelling


async def test_a_waiting_rollout_is_cancelled_out_of_the_queue(box: Box) -> None:
    ids = await box.enqueue(2)
    cancelled = await box.store.cancel_rollout(ids[0])
    assert (cancelled.status, cancelled.end_time) == ("cancelled", box.clock.now)
    assert [rollout.rollout_id for rollout in await box.store.dequeue_many_rollouts(limit=9)] == ids[1:]


@pytest.mark.parametrize("end", ["succeeded", "failed", "silence", "span"])
async def test_cancelled_stays_cancelled(box: Box, end: str) -> None:
    rollout = await box.take(max_attempts=9, retry_condition={"failed", "unresponsive"})
    await box.store.cancel_rollout(rollout.rollout_id)
    if end == "silence":
        assert await box.pass_time(60) == 1
    elif end == "span":
        await box.store.add_span(span_of(rollout))
    else:
        assert (
            await box.store.finish_attempt(rollout, end, BROKEN if end == "failed" else None)
        ).status == "cancelled"
    assert (await box.status(rollout))[0] == "cancelled"
    assert (await box.store.cancel_rollout(rollout.rollout_id)).status == "cancelled"
    assert await box.store.dequeue_rollout() is None
    with pytest.raises(InvalidTransitionError, match="cancelled"):
        await box.store.start_attempt(rollout.rollout_id)


async def test_the_runner_of_a_cancelled_rollout_is_told(box: Box) -> None:
    first, second = await box.take(), await box.take()
    assert await box.store.heartbeat("w", {}, [ids_of(first)[1], ids_of(second)[1]]) == []
    await box.store.cancel_rollout(first.rollout_id)
    assert await box.store.heartbeat("w", {}, [ids_of(first)[1], ids_of(second)[1]]) == [ids_of(first)[1]]


async def test_many_are_cancelled_together_or_not_at_all(box: Box) -> None:
    done, running = await box.take(), await box.take()
    await box.store.finish_attempt(done, "succeeded")
    ids = [done.rollout_id, running.rollout_id, *await box.enqueue()]
    with pytest.raises(UnknownIdError, match="ro-none"):
        await box.store.cancel_rollouts([*ids, "ro-none"])
    assert [(await box.status(rollout_id))[0] for rollout_id in ids] == ["succeeded", "preparing", "queuing"]
    assert [rollout.status for rollout in await box.store.cancel_rollouts(ids)] == [
        "succeeded",
        "cancelled",
        "cancelled",
    ]
    assert await box.store.cancel_rollouts([]) == []


async def test_only_those_in_the_queue_are_cancelled(box: Box) -> None:
    running, done = await box.take(), await box.take()
    await box.store.finish_attempt(done, "succeeded")
    ids = [running.rollout_id, done.rollout_id, *await box.enqueue()]
    cancelled = await box.store.cancel_rollouts(ids, waiting_only=True)
    assert [rollout.status for rollout in cancelled] == ["preparing", "succeeded", "cancelled"]
