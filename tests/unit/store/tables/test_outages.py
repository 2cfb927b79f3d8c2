"""Outages of serving in the store: what waits, what is lost, and what is charged."""

import asyncio
from pathlib import Path

import pytest
from store_helpers import BROKEN, LEASE_S, LOST, Box, Clock, begun, open_box, reward_of

from raylight.errors import DiskError

SOURCE = "policy"


async def go_away(box: Box, seconds: float = 0.0, source: str = SOURCE) -> int:
    return await box.store.report_outage(source, box.clock.lived() - seconds, "refused")


async def come_back(box: Box, source: str = SOURCE) -> None:
    assert await box.store.report_outage(source, None) == 0


async def test_nothing_is_dequeued_while_serving_is_away(box: Box) -> None:
    (waiting,) = await box.enqueue()
    await go_away(box)
    assert await box.store.dequeue_rollout("w") is None
    await come_back(box)
    assert (await box.again()).rollout_id == waiting


async def test_a_poll_goes_on_when_serving_is_back(box: Box) -> None:
    await go_away(box)
    await box.enqueue()
    polling = await begun(box.store.dequeue_rollout("w", timeout=30))
    await come_back(box)
    assert await asyncio.wait_for(polling, 10) is not None


async def test_every_source_must_be_back(box: Box) -> None:
    await box.enqueue()
    await go_away(box)
    await go_away(box, source="judge")
    await come_back(box)
    assert await box.store.dequeue_rollout("w") is None
    await come_back(box, "judge")
    assert await box.store.dequeue_rollout("w") is not None


async def test_running_attempts_are_lost_and_not_charged(box: Box) -> None:
    """More often than `infrastructure_retries` allows."""
    rollout = await box.take(infrastructure_retries=0)
    for _ in range(4):
        assert await go_away(box) == 1
        assert await box.status(rollout) == ("requeuing", "failed")
        assert await box.store.heartbeat("w", {}, [rollout.attempt.attempt_id]) == [
            rollout.attempt.attempt_id
        ]
        await come_back(box)
        rollout = await box.again()
    assert (await box.store.finish_attempt(rollout, "succeeded")).status == "succeeded"
    failure = (await box.attempt(rollout)).failure
    assert (failure.kind, failure.error) == ("infrastructure", "ServingAway: refused")
    assert await box.count("attempts_lost_in_outages") == await box.count("outages") == 4


@pytest.mark.parametrize("failure", [None, BROKEN, LOST])
async def test_an_attempt_that_ended_since_the_last_good_probe_runs_again(box: Box, failure: object) -> None:
    """An agent may have swallowed the connection error and returned 0, or raised another error."""
    rollout = await box.take(infrastructure_retries=0)
    await box.store.add_span(reward_of(rollout, 0.0))
    status = "succeeded" if failure is None else "failed"
    assert (await box.store.finish_attempt(rollout, status, failure)).status == status
    box.clock.now += 1
    assert await go_away(box, seconds=2) == 1
    assert await box.status(rollout) == ("requeuing", "failed")
    await come_back(box)
    assert (await box.again()).rollout_id == rollout.rollout_id


async def test_what_ended_before_stays(box: Box) -> None:
    done = await box.take()
    await box.store.finish_attempt(done, "succeeded")
    failed = await box.take()
    await box.store.finish_attempt(failed, "failed", BROKEN)
    box.clock.now += 5
    assert await go_away(box) == 0
    assert (await box.status(done), await box.status(failed)) == (
        ("succeeded", "succeeded"),
        ("failed", "failed"),
    )


async def test_a_charge_of_the_outage_is_taken_back(box: Box) -> None:
    rollout = await box.take(infrastructure_retries=1)
    await box.store.finish_attempt(rollout, "failed", LOST)
    await go_away(box)
    await come_back(box)
    rollout = await box.again()  # at once: it is no longer held back
    assert rollout.attempt.start_time == box.clock.now
    assert (await box.store.finish_attempt(rollout, "failed", LOST)).status == "requeuing"
    assert (await box.store.finish_attempt(await box.again(), "failed", LOST)).status == "failed"


async def test_an_attempt_that_waited_in_silence_is_not_charged(box: Box) -> None:
    rollout = await box.take(unresponsive_seconds=20)
    await box.pass_time(21)
    assert await box.status(rollout) == ("failed", "unresponsive")
    assert await go_away(box, seconds=21) == 1
    assert await box.status(rollout) == ("requeuing", "failed")


async def test_decisions_by_hand_stay(box: Box) -> None:
    cancelled, decided = await box.take(), await box.take()
    await box.store.cancel_rollout(cancelled.rollout_id)
    await box.store.update_rollout(decided.rollout_id, status="succeeded")
    by_hand = await box.store.start_rollout(1)
    await go_away(box)
    assert (await box.status(cancelled))[0] == "cancelled"
    assert (await box.status(decided))[0] == "succeeded"
    assert await box.status(by_hand) == ("preparing", "preparing")


async def test_a_repeated_report_changes_nothing(box: Box) -> None:
    await box.take()
    assert await go_away(box) == 1
    assert await go_away(box) == 0
    box.clock.now += 7
    await come_back(box)
    await come_back(box)
    counts = await box.counts()
    assert (counts["outages"], counts["outage_seconds"]) == (1, 7)


async def test_a_late_result_of_a_lost_attempt_decides_nothing(box: Box) -> None:
    rollout = await box.take()
    await go_away(box)
    assert (await box.store.finish_attempt(rollout, "succeeded")).status == "requeuing"
    assert await box.count("attempts_late") == 1


# delays after losses


async def test_a_rollout_that_lost_a_service_is_held_back(box: Box) -> None:
    rollout = await box.take()
    await box.store.finish_attempt(rollout, "failed", LOST)
    (other,) = await box.enqueue()
    assert (await box.store.dequeue_rollout("w")).rollout_id == other
    assert await box.store.dequeue_rollout("w") is None
    await box.pass_time(0.9)
    assert await box.store.dequeue_rollout("w") is None
    await box.pass_time(1.1)
    assert (await box.store.dequeue_rollout("w")).rollout_id == rollout.rollout_id


async def test_the_timer_wakes_a_poll_when_the_delay_is_over(box: Box) -> None:
    rollout = await box.take()
    await box.store.finish_attempt(rollout, "failed", LOST)
    released = box.service._leases.next_deadline()
    assert released is not None
    assert 1 <= released - box.service._clock.lived() <= 2
    polling = await begun(box.store.dequeue_rollout("w", timeout=30))
    await box.pass_time(2)
    assert await asyncio.wait_for(polling, 10) is not None


async def test_a_lost_runner_delays_nothing(box: Box) -> None:
    rollout = await box.take("w")
    await box.store.release_worker("w", "died")
    assert (await box.store.dequeue_rollout("v")).rollout_id == rollout.rollout_id
    await box.pass_time(LEASE_S)
    assert (await box.store.dequeue_rollout("u")).rollout_id == rollout.rollout_id


async def test_a_rollout_that_is_queued_again_by_hand_has_all_its_retries(box: Box) -> None:
    rollout = await box.take(max_attempts=2, retry_condition={"failed"}, infrastructure_retries=1)
    for failure in (LOST, BROKEN, BROKEN):
        await box.store.finish_attempt(rollout, "failed", failure)
        rollout = await box.again() if failure is LOST or rollout.attempt.sequence_id < 3 else rollout
    assert await box.status(rollout) == ("failed", "failed")
    await box.store.update_rollout(rollout.rollout_id, status="requeuing")
    for failure, expected in ((LOST, "requeuing"), (BROKEN, "requeuing"), (BROKEN, "failed")):
        rollout = await box.again()
        assert (await box.store.finish_attempt(rollout, "failed", failure)).status == expected


@pytest.mark.parametrize("change", ["away", "back"])
async def test_a_report_that_was_not_stored_can_be_repeated(box: Box, change: str) -> None:
    rollout = await box.take()
    await box.enqueue()
    if change == "back":
        await go_away(box)
    polling = None if change == "away" else await begun(box.store.dequeue_rollout("w", timeout=30))
    report = go_away if change == "away" else come_back

    def fail() -> None:
        raise DiskError("full")

    box.service._methods["fail"] = fail
    since = box.clock.lived() if change == "away" else None
    with pytest.raises(DiskError):  # of a call in the same message
        await box.service.call([("report_outage", (SOURCE, since, "refused")), ("fail", ())])
    assert box.service._outages.is_away == (change == "back")
    await report(box)
    if polling is None:
        assert await box.status(rollout) == ("requeuing", "failed")
    else:
        assert await asyncio.wait_for(polling, 10) is not None


async def test_what_ended_before_an_outage_stays_though_the_store_was_killed(tmp_path: Path) -> None:
    """The time in which the store was away is not lived, but the model was watched meanwhile."""
    clock, away_for = Clock(), 8.0
    async with open_box(tmp_path / "s.db", clock) as box:
        for _ in range(2):
            rollout = await box.take()
            clock.now += 1.0
            await box.store.finish_attempt(rollout, "succeeded")
            ended = clock.lived()
    clock.now += away_for
    async with open_box(tmp_path / "s.db", clock) as box:
        clock.now += 1.0
        assert await box.store.report_outage("ingress", ended + 0.5, "refused") == 0
        await box.store.report_outage("ingress", None)
        assert await box.store.report_outage("judge", ended - 0.5, "refused") == 1, "the last one"
