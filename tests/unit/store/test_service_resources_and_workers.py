"""Resources and workers in the store, and its counts."""

from typing import Any

import pytest
from store_helpers import BROKEN, LEASE_S, LOST, Box, begun, ids_of, span_of
from unit_helpers import within

import raylight as rl
from raylight.errors import StoreError, UnknownIdError, WorkerGoneError
from raylight.types import Worker

# resources


async def test_resources_come_back_as_they_were_given(box: Box) -> None:
    given: dict[str, Any] = {"llm": {"model": "m"}, "f": rl.PromptTemplate(template="{a}"), "set": {1}}
    assert await box.store.get_latest_resources() is None
    update = await box.store.add_resources(given)
    given["llm"]["model"] = "changed"
    assert (
        update
        == await box.store.get_latest_resources()
        == await box.store.get_resources_by_id(update.resources_id)
    )
    assert update.resources == {"llm": {"model": "m"}, "f": rl.PromptTemplate(template="{a}"), "set": {1}}
    assert (update.version, update.create_time, update.update_time) == (1, 1000.0, 1000.0)


async def test_what_was_added_or_updated_last_is_the_latest(box: Box) -> None:
    first, second = await box.store.add_resources({"n": 1}), await box.store.add_resources({"n": 2})
    assert (await box.store.get_latest_resources()).resources_id == second.resources_id
    box.clock.now += 5
    updated = await box.store.update_resources(first.resources_id, {"n": 3})
    assert (updated.version, updated.create_time, updated.update_time, updated.resources) == (
        2,
        1000.0,
        1005.0,
        {"n": 3},
    )
    assert await box.store.get_latest_resources() == updated
    assert (await box.store.get_resources_by_id(second.resources_id)).version == 1
    third = await box.store.add_resources({})
    assert await box.store.get_latest_resources() == third


async def test_an_update_that_changes_nothing_keeps_the_version(box: Box) -> None:
    first = await box.store.add_resources({"n": 1})
    await box.store.add_resources({"n": 2})
    box.clock.now += 5
    assert await box.store.update_resources(first.resources_id, {"n": 1}) == first
    assert await box.store.get_latest_resources() == first


async def test_unknown_resources_are_an_error(box: Box) -> None:
    with pytest.raises(UnknownIdError, match="rs-none"):
        await box.store.get_resources_by_id("rs-none")
    assert await box.store.get_latest_resources() is None


async def test_resources_may_be_added_under_an_id_of_the_users(box: Box) -> None:
    added = await box.store.update_resources("mine", {"a": 1})
    assert (added.resources_id, added.version, added.resources) == ("mine", 1, {"a": 1})
    assert await box.store.get_latest_resources() == added
    assert (await box.store.update_resources("mine", {"a": 2})).version == 2
    assert (await box.store.enqueue_rollout(1)).resources_id == "mine"


async def test_resources_are_queried(box: Box) -> None:
    ids = []
    for i in range(4):
        box.clock.now += 1
        ids.append((await box.store.add_resources({"i": i})).resources_id)
    await box.store.update_resources(ids[1], {"i": 9})

    async def found(**query: Any) -> list[int]:
        return [ids.index(update.resources_id) for update in await box.store.query_resources(**query)]

    assert await found() == [0, 1, 2, 3]
    assert await found(sort_by="update_time") == [0, 2, 1, 3]
    assert await found(sort_by="version", sort_order="desc") == [1, 0, 2, 3]
    assert await found(sort_by="create_time", sort_order="desc", limit=2, offset=1) == [2, 1]
    assert await found(resources_id=ids[2]) == [2]
    assert await found(resources_id="rs-none") == []
    assert await found(resources_id_contains=ids[3][4:]) == [3]
    assert await found(resources_id_contains="rs-") == [0, 1, 2, 3]
    assert await found(resources_id_contains="rs-", resources_id=ids[0]) == [0]


# workers


async def test_a_worker_is_busy_while_it_has_an_attempt(box: Box) -> None:
    assert await box.store.query_workers() == []
    first = await box.take("w")
    assert await box.store.get_worker_by_id("w") == Worker(
        worker_id="w",
        status="busy",
        last_dequeue_time=1000.0,
        last_busy_time=1000.0,
        current_rollout_id=first.rollout_id,
        current_attempt_id=ids_of(first)[1],
    )
    box.clock.now += 1
    second = await box.take("w")
    assert (await box.store.get_worker_by_id("w")).current_attempt_id == ids_of(second)[1]
    await box.store.finish_attempt(second, "succeeded")
    worker = await box.store.get_worker_by_id("w")
    assert (worker.status, worker.current_attempt_id, worker.last_idle_time) == (
        "busy",
        ids_of(first)[1],
        None,
    )
    box.clock.now += 1
    await box.store.finish_attempt(first, "failed", BROKEN)
    worker = await box.store.get_worker_by_id("w")
    assert (worker.status, worker.current_attempt_id, worker.last_idle_time) == ("idle", None, 1002.0)
    assert worker.last_busy_time == 1001.0


async def test_a_worker_whose_attempt_is_not_heard_of_is_not_busy(box: Box) -> None:
    rollout = await box.take("w")
    await box.pass_time(LEASE_S)
    assert (await box.store.get_worker_by_id("w")).status == "idle"
    await box.store.add_span(span_of(rollout))
    assert (await box.store.get_worker_by_id("w")).status == "busy"


@pytest.mark.parametrize("timeout", [0.0, 0.01])
async def test_a_worker_that_asks_is_known(box: Box, timeout: float) -> None:
    assert await box.store.dequeue_rollout("w", timeout=timeout) is None
    worker = await box.store.get_worker_by_id("w")
    assert (worker.status, worker.last_dequeue_time, worker.last_heartbeat_time) == ("idle", 1000.0, None)


async def test_a_worker_that_waits_for_a_rollout_is_idle(box: Box) -> None:
    async with within():
        waiting = await begun(box.store.dequeue_rollout("w", timeout=60))
        assert (await box.store.get_worker_by_id("w")).status == "idle"
        await box.enqueue()
        assert (await waiting).attempt.worker_id == "w"


async def test_heartbeats_keep_the_last_statistics(box: Box) -> None:
    worker = await box.store.update_worker("w")
    assert (worker.status, worker.heartbeat_stats, worker.last_heartbeat_time) == ("unknown", None, 1000.0)
    assert (await box.store.update_worker("w", {"cpu": 0.5, "a": ["\ud800"]})).heartbeat_stats == {
        "cpu": 0.5,
        "a": ["\ud800"],
    }
    box.clock.now += 5
    worker = await box.store.update_worker("w")
    assert (worker.heartbeat_stats, worker.last_heartbeat_time) == ({"cpu": 0.5, "a": ["\ud800"]}, 1005.0)
    assert await box.store.heartbeat("w", {}, []) == []
    assert (await box.store.get_worker_by_id("w")).heartbeat_stats == {}
    assert worker == worker.model_copy()
    with pytest.raises(StoreError, match="must be JSON"):
        await box.store.update_worker("w", {"lock": object()})
    with pytest.raises(UnknownIdError, match="'v'"):
        await box.store.get_worker_by_id("v")


async def test_a_released_worker_is_lost_for_good(box: Box) -> None:
    first, second, other = await box.take("w"), await box.take("w"), await box.take("v")
    assert await box.store.release_worker("w", "killed") == 2
    assert await box.store.release_worker("w", "killed") == 0
    assert (await box.store.get_worker_by_id("w")).status == "unknown"
    for rollout in (first, second):
        assert await box.status(rollout) == ("requeuing", "failed")
        assert (await box.attempt(rollout)).failure.kind == "infrastructure"
    assert await box.status(other) == ("preparing", "preparing")
    for timeout in (0, 60):
        with pytest.raises(WorkerGoneError, match="released w"):
            await box.store.dequeue_many_rollouts(limit=9, worker_id="w", timeout=timeout)
    assert len(await box.store.dequeue_many_rollouts(limit=9, worker_id="u")) == 1, "both are suspected"
    assert len(await box.store.dequeue_many_rollouts(limit=9, worker_id="v")) == 1
    with pytest.raises(WorkerGoneError):
        await box.store.dequeue_rollout("w")
    assert (await box.store.get_worker_by_id("w")).last_dequeue_time == 1000.0
    assert await box.store.release_worker("never seen", "killed") == 0
    assert (await box.store.update_worker("never seen")).status == "unknown"


async def test_workers_are_queried(box: Box) -> None:
    await box.take("b-busy")
    box.clock.now += 1
    await box.store.update_worker("a-idle")
    assert await box.store.dequeue_rollout("a-idle") is None
    await box.store.release_worker("c-gone", "died")

    async def found(**query: Any) -> str:
        return " ".join(worker.worker_id for worker in await box.store.query_workers(**query))

    assert await found() == "a-idle b-busy c-gone"
    assert await found(status_in=["busy", "unknown"]) == "b-busy c-gone"
    assert await found(status_in=[]) == ""
    assert await found(worker_id_contains="-b") == "b-busy"
    assert await found(status_in=["idle"], worker_id_contains="busy") == ""
    assert await found(status_in=["idle"], worker_id_contains="busy", filter_logic="or") == "a-idle b-busy"
    assert await found(sort_by="worker_id", sort_order="desc", limit=1) == "c-gone"
    assert await found(sort_by="status") == "b-busy a-idle c-gone"
    assert await found(sort_by="last_busy_time", sort_order="desc", offset=0, limit=1) == "b-busy"
    assert await found(sort_by="last_heartbeat_time") == "b-busy c-gone a-idle"
    assert await found(sort_by="current_rollout_id", sort_order="desc", limit=1) == "b-busy"


# counts


async def test_statistics_follow_everything(box: Box) -> None:
    assert await box.counts() == {}
    ids = await box.enqueue(5)
    await box.store.add_resources({})
    taken = await box.store.dequeue_many_rollouts(limit=4, worker_id="w")
    assert await box.counts() == {
        "total_rollouts": 5,
        "total_attempts": 4,
        "total_resources": 1,
        "total_workers": 1,
        "rollouts_queuing": 1,
        "rollouts_preparing": 4,
    }
    await box.store.add_many_spans([span_of(taken[0]), span_of(taken[0])])
    await box.store.finish_attempt(taken[1], "succeeded")
    await box.store.finish_attempt(taken[2], "failed", BROKEN)
    await box.store.finish_attempt(taken[3], "failed", LOST)
    await box.store.cancel_rollout(ids[4])
    await box.store.start_rollout(1)
    assert await box.counts() == {
        "total_rollouts": 6,
        "total_attempts": 5,
        "total_resources": 1,
        "total_workers": 1,
        "total_spans": 2,
        "rollouts_running": 1,
        "rollouts_succeeded": 1,
        "rollouts_failed": 1,
        "rollouts_requeuing": 1,
        "rollouts_cancelled": 1,
        "rollouts_preparing": 1,
        "attempts_failed_agent": 1,
        "attempts_failed_infrastructure": 1,
    }


async def test_what_was_undone_is_not_counted(box: Box) -> None:
    rollout = await box.take()
    before = await box.counts()
    with pytest.raises(UnknownIdError):
        await box.store.add_many_spans(
            [span_of(rollout), span_of(rollout).model_copy(update={"attempt_id": "none"})]
        )
    with pytest.raises(UnknownIdError):
        await box.store.cancel_rollouts([rollout.rollout_id, "none"])
    assert await box.counts() == before
