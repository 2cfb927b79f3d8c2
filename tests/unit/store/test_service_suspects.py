"""Suspects: a rollout that brings its runners down is found out, and its neighbours do not pay for it."""

import asyncio
from collections import Counter
from typing import Any

import pytest
from store_helpers import BROKEN, LEASE_S, LOST, Box, begun, ids_of, open_box, span_of
from unit_helpers import within

from raylight.errors import WorkerGoneError
from raylight.store.tables.transitions import InfrastructureLosses, decide
from raylight.types import Rollout, RolloutConfig


async def suspects(box: Box, n: int, **config: Any) -> list[str]:
    """Rollouts that were together on a runner that died."""
    ids = await box.enqueue(n, **config)
    await box.store.dequeue_many_rollouts(limit=n, worker_id="dead")
    assert await box.store.release_worker("dead", "died") == n
    return ids


def of(box: Box, rollout: Rollout | str) -> tuple[int, int, int]:
    """`(lost, charged, suspect)` of a rollout."""
    rollout_id = rollout if isinstance(rollout, str) else rollout.rollout_id
    found = box.service._journal.fetch_one(
        "SELECT lost, charged, suspect FROM rollouts WHERE rollout_id = ?", (rollout_id,)
    )
    assert found is not None
    return found


def names(rollouts: list[Rollout]) -> list[str]:
    return [rollout.rollout_id for rollout in rollouts]


# who is charged


@pytest.mark.parametrize(
    ("status", "sequence_id", "infrastructure", "losses", "config", "expected"),
    [
        ("running", 1, False, InfrastructureLosses(0, 0), {}, "running"),
        ("failed", 1, False, InfrastructureLosses(0, 0), {}, "failed"),
        ("failed", 3, True, InfrastructureLosses(2, 2), {}, "requeuing"),
        ("failed", 3, True, InfrastructureLosses(3, 3), {}, "failed"),
        ("failed", 50, True, InfrastructureLosses(49, 2), {}, "requeuing"),
        ("failed", 50, True, InfrastructureLosses(50, 3), {}, "failed"),
        (
            "failed",
            50,
            False,
            InfrastructureLosses(49, 1),
            {"max_attempts": 2, "retry_condition": {"failed"}},
            "requeuing",
        ),
        (
            "failed",
            51,
            False,
            InfrastructureLosses(49, 1),
            {"max_attempts": 2, "retry_condition": {"failed"}},
            "failed",
        ),
        (
            "failed",
            50,
            True,
            InfrastructureLosses(50, 3),
            {"max_attempts": 2, "retry_condition": {"failed"}},
            "requeuing",
        ),
        (
            "failed",
            51,
            True,
            InfrastructureLosses(51, 4),
            {"max_attempts": 2, "retry_condition": {"failed"}},
            "failed",
        ),
    ],
)
def test_only_charged_losses_use_up_retries(
    status: Any,
    sequence_id: int,
    infrastructure: bool,
    losses: InfrastructureLosses,
    config: dict[str, Any],
    expected: str,
) -> None:
    kind = "infrastructure" if infrastructure else None
    assert decide(status, sequence_id, kind, losses, RolloutConfig(**config)) == expected


async def test_the_only_attempt_of_a_runner_is_charged(box: Box) -> None:
    rollout = await box.take("w0")
    for deaths in (1, 2, 3):
        await box.store.release_worker(f"w{deaths - 1}", "died")
        assert of(box, rollout) == (deaths, deaths, 1)
        assert (await box.status(rollout))[0] == ("failed" if deaths == 3 else "requeuing")
        if deaths < 3:
            await box.again(f"w{deaths}")


async def test_of_several_none_is_charged_and_all_are_suspected(box: Box) -> None:
    for rollout_id in await suspects(box, 3, infrastructure_retries=0):
        assert of(box, rollout_id) == (1, 0, 1)
        assert await box.status(rollout_id) == ("requeuing", "failed")
    assert await box.count("attempts_failed_infrastructure") == 3


async def test_a_death_charges_the_only_suspect(box: Box) -> None:
    first, second = await suspects(box, 2)
    clean = await box.enqueue(2)
    assert names(await box.store.dequeue_many_rollouts(limit=9, worker_id="w")) == [first, *clean]
    assert await box.store.release_worker("w", "died") == 3
    assert [of(box, i) for i in (first, second, *clean)] == [(2, 1, 1), (1, 0, 1), (1, 0, 1), (1, 0, 1)]


async def test_of_several_suspects_none_is_charged(box: Box) -> None:
    """A worker holds two suspects only if one was assigned by hand."""
    first, second = await suspects(box, 2)
    await box.again("w")
    moved = await box.again("v")
    await box.store.update_attempt(*ids_of(moved), worker_id="w")
    clean = await box.take("w")
    await box.store.release_worker("w", "died")
    assert [of(box, i) for i in (first, second, clean)] == [(2, 0, 1), (2, 0, 1), (1, 0, 1)]


async def test_a_lease_that_ended_and_was_taken_up_again_is_charged_to_nobody(box: Box) -> None:
    rollout = await box.take()
    await box.pass_time(LEASE_S)
    assert of(box, rollout) == (1, 1, 0)
    await box.store.add_span(span_of(rollout))
    assert of(box, rollout) == (0, 0, 0)


@pytest.mark.parametrize(
    ("status", "failure", "suspected"),
    [("succeeded", None, 0), ("failed", BROKEN, 0), ("timeout", BROKEN, 0), ("failed", LOST, 1)],
)
async def test_an_attempt_that_ends_otherwise_acquits_its_rollout(
    box: Box, status: Any, failure: Any, suspected: int
) -> None:
    first, second = await suspects(box, 2, max_attempts=5, retry_condition={"failed", "timeout"})
    await box.store.finish_attempt(await box.again("w"), status, failure)
    assert of(box, first)[2] == suspected
    assert of(box, second)[2] == 1


async def test_an_attempt_that_time_ends_acquits_its_rollout_but_a_lost_lease_does_not(box: Box) -> None:
    lost, limited = await suspects(box, 2)
    await box.store.update_rollout(limited, config=RolloutConfig(timeout_seconds=5))
    await box.again("w")
    await box.again("v")
    await box.pass_time(LEASE_S)
    assert (await box.status(lost), await box.status(limited)) == (
        ("requeuing", "unresponsive"),
        ("failed", "timeout"),
    )
    assert (of(box, lost)[2], of(box, limited)[2]) == (1, 0)


# who gets them


async def test_a_worker_has_one_suspect_at_a_time_and_any_number_of_others(box: Box) -> None:
    ids = await suspects(box, 3)
    clean = await box.enqueue(3)
    assert names(await box.store.dequeue_many_rollouts(limit=2, worker_id="w")) == [ids[0], clean[0]]
    assert names(await box.store.dequeue_many_rollouts(limit=1, worker_id="w")) == [clean[1]]
    assert names(await box.store.dequeue_many_rollouts(limit=1, worker_id="v")) == [ids[1]]
    assert names(await box.store.dequeue_many_rollouts(limit=9, worker_id="w")) == [clean[2]]
    assert names(await box.store.dequeue_many_rollouts(limit=9, worker_id="w")) == []
    assert names(await box.store.dequeue_many_rollouts(limit=9, worker_id="u")) == [ids[2]]


async def test_suspects_outlive_the_store(tmp_path: Any) -> None:
    async with open_box(tmp_path / "s.db") as box:
        ids = await suspects(box, 2)
        await box.again("w")
    async with open_box(tmp_path / "s.db") as box:
        assert await box.store.dequeue_rollout("w") is None
        assert (await box.again("v")).rollout_id == ids[1]


@pytest.mark.parametrize(
    "end",
    ["succeeded", "failed", "lost", "lease", "timeout", "silence", "handed over", "acquitted elsewhere"],
)
async def test_a_waiting_dequeue_wakes_when_its_workers_suspect_ends(box: Box, end: str) -> None:
    async with within():
        ids = await suspects(box, 2)
        limits = {"timeout": {"timeout_seconds": 5}, "silence": {"unresponsive_seconds": 5}}.get(end, {})
        await box.store.update_rollout(ids[0], config=RolloutConfig(**limits))
        held = await box.again("w")
        waiting = await begun(box.store.dequeue_rollout("w", timeout=60))
        match end:
            case "succeeded":
                await box.store.finish_attempt(held, "succeeded")
            case "failed":
                await box.store.update_attempt(*ids_of(held), status="failed", failure=BROKEN)
            case "lost":
                await box.store.finish_attempt(held, "failed", LOST)
            case "lease" | "timeout" | "silence":
                await box.pass_time(LEASE_S)
            case "handed over":
                await box.store.update_attempt(*ids_of(held), worker_id="v")
            case "acquitted elsewhere":
                await box.store.finish_attempt(await box.store.start_attempt(ids[0]), "failed", BROKEN)
        assert (await waiting).rollout_id == ids[1]


async def test_where_only_suspects_wait_and_everybody_has_one_nothing_spins(box: Box) -> None:
    async with within():
        ids = await suspects(box, 6)
        workers = ["u", "v", "w"]
        held = [await box.again(worker) for worker in workers]
        looks: list[str] = []
        box.service._journal.db.set_trace_callback(looks.append)
        waiting = [await begun(box.store.dequeue_rollout(worker, timeout=60)) for worker in workers]
        looked = len(looks)
        for _ in range(100):
            await asyncio.sleep(0)
        assert len(looks) == looked, "nobody looks again as long as nothing happens"
        assert await box.store.dequeue_rollout("u", timeout=0.01) is None
        for rollout, poll, rollout_id in zip(held, waiting, ids[3:], strict=True):
            await box.store.finish_attempt(rollout, "succeeded")
            assert (await poll).rollout_id == rollout_id


# all together


async def work(box: Box, worker: str, slots: int, poison: set[str]) -> int:
    """A runner that takes what it gets, does what is healthy, and dies of a poison; returns how many it had
    then."""
    while True:
        held = await box.store.dequeue_many_rollouts(limit=slots, worker_id=worker, timeout=1e-9)
        if not held:
            return 0
        for rollout in held:
            await box.store.add_span(span_of(rollout))
        if poison & {rollout.rollout_id for rollout in held}:
            return await box.store.release_worker(worker, "died")
        for rollout in held:
            await box.store.finish_attempt(rollout, "succeeded")


@pytest.mark.parametrize("slots", [1, 4, 21, 50])
@pytest.mark.parametrize("place", [0, 10, 20])
@pytest.mark.parametrize("retries", [0, 2])
async def test_a_poison_fails_and_its_neighbours_succeed(
    box: Box, slots: int, place: int, retries: int
) -> None:
    ids = await box.enqueue(21, infrastructure_retries=retries)
    deaths: list[int] = []
    while died_with := await work(box, f"w{len(deaths)}", slots, {ids[place]}):
        deaths.append(died_with)
    statuses = Counter([(await box.status(rollout_id))[0] for rollout_id in ids])
    assert statuses == {"succeeded": 20, "failed": 1}
    lost, charged, _ = of(box, ids[place])
    assert (await box.status(ids[place]))[0] == "failed"
    assert (lost, charged) == (len(deaths), retries + 1)
    assert len(deaths) <= retries + 2, "all but the first, of many, are charged"


@pytest.mark.parametrize("slots", [4, 21])
async def test_suspects_do_not_pay_for_a_poison_that_nobody_suspects_yet(box: Box, slots: int) -> None:
    """A machine went down with twenty healthy rollouts, and a poison waits in the queue."""
    ids = await suspects(box, 20)
    (poison,) = await box.enqueue()
    deaths = 0
    while await work(box, f"w{deaths}", slots, {poison}):
        deaths += 1
    assert [(await box.status(rollout_id))[0] for rollout_id in ids] == ["succeeded"] * 20
    assert (await box.status(poison))[0] == "failed"
    assert (deaths, max(of(box, rollout_id)[1] for rollout_id in ids), of(box, poison)[1]) == (4, 1, 3)


async def test_a_poison_among_runners_that_work_side_by_side(box: Box) -> None:
    """Each runner dies at once of the poison, and a new one takes its place."""
    async with within():
        ids = await box.enqueue(21)
        poison, deaths = ids[7], Counter[str]()

        async def runner(slot: str) -> None:
            while True:
                worker = f"{slot}-{deaths[slot]}"
                try:
                    held = await box.store.dequeue_many_rollouts(limit=4, worker_id=worker, timeout=60)
                    await asyncio.gather(*[box.store.add_span(span_of(rollout)) for rollout in held])
                    if poison in names(held):
                        await box.store.release_worker(worker, "died")
                    await asyncio.gather(
                        *[box.store.finish_attempt(rollout, "succeeded") for rollout in held]
                    )
                except WorkerGoneError:
                    deaths[slot] += 1

        runners = [asyncio.create_task(runner(slot)) for slot in "abc"]
        await box.store.wait_until_decided(rollout_ids=ids)
        for task in runners:
            task.cancel()
        await asyncio.wait(runners)
    found = await box.store.get_rollout_states(ids)
    assert [rollout.rollout_id for rollout in found if rollout.status != "succeeded"] == [poison]
    assert of(box, poison)[1] == 3


# planned departures


async def test_a_retired_worker_takes_nothing_more_and_finishes_what_it_executes(box: Box) -> None:
    rollout = await box.take("w")
    async with within():
        polling = asyncio.create_task(box.store.dequeue_many_rollouts(worker_id="w", timeout=60))
        await asyncio.sleep(0)
        await box.store.retire_worker("w")
        with pytest.raises(WorkerGoneError):
            await polling
    assert await box.store.heartbeat("w", {}, [rollout.attempt.attempt_id]) == []
    assert (await box.store.finish_attempt(rollout, "succeeded")).status == "succeeded"


async def test_a_planned_departure_makes_no_suspect_and_charges_no_rollout(box: Box) -> None:
    for number in range(5):
        rollout = (
            await box.take(f"w{number}", max_attempts=1) if not number else await box.again(f"w{number}")
        )
        assert await box.store.release_worker(f"w{number}", "its node drains", planned=True) == 1
        assert of(box, rollout) == (number + 1, 0, False)
        attempt = await box.attempt(rollout, number + 1)
        assert attempt.failure.error == "RunnerRemoved: its node drains"


async def test_a_dequeue_without_suspects_does_not_read_what_its_worker_executes(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may execute a thousand attempts."""
    monkeypatch.setattr(box.service._leases, "_held_by", lambda _: pytest.fail("it read them"))
    ids = await box.enqueue(3)
    rollouts = [await box.store.dequeue_rollout(worker_id="w") for _ in ids]
    assert [rollout and rollout.rollout_id for rollout in rollouts] == ids
