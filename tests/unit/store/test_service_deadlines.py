"""Time in the store: leases, silence and timeouts of attempts."""

from pathlib import Path
from typing import Any

import pytest
from store_helpers import BROKEN, LEASE_S, LOST, Box, Clock, call_of, ids_of, open_box, span_of

from raylight.store.tables.attempts import TIMEOUT_GRACE_S
from raylight.types import Failure, JsonObject, Rollout, RolloutConfig

# leases


@pytest.mark.parametrize("worker_id", ["w", None])
async def test_a_dequeue_that_is_never_heard_of_again_goes_back_to_the_queue(
    box: Box, worker_id: str | None
) -> None:
    first = await box.take(worker_id)
    assert await box.pass_time(LEASE_S - 0.1) == 0
    assert await box.pass_time(0.1) == 1
    assert await box.status(first) == ("requeuing", "unresponsive")
    failure = (await box.attempt(first)).failure
    assert (failure.kind, "sent no heartbeat for 60 s" in failure.error) == ("infrastructure", True)
    second = await box.again("v")
    assert (second.rollout_id, second.attempt.sequence_id) == (first.rollout_id, 2)
    assert (await box.store.finish_attempt(second, "succeeded")).status == "succeeded"


async def test_it_fails_at_last_if_every_lease_ends(box: Box) -> None:
    rollout = await box.take()
    for _ in range(2):
        await box.pass_time(LEASE_S)
        rollout = await box.again()
    await box.pass_time(LEASE_S)
    assert await box.status(rollout) == ("failed", "unresponsive")


@pytest.mark.parametrize("renewal", ["span", "call", "heartbeat", "update_worker", "update_attempt"])
async def test_a_lease_is_renewed_by(box: Box, renewal: str) -> None:
    rollout = await box.take()
    for _ in range(3):
        assert await box.pass_time(LEASE_S - 1) == 0
        match renewal:
            case "span":
                await box.store.add_span(span_of(rollout))
            case "call":
                await box.store.capture([(call_of(rollout), 0.0)], [])
            case "heartbeat":
                assert await box.store.heartbeat("w", {}, [ids_of(rollout)[1]]) == []
            case "update_worker":
                await box.store.update_worker("w")
            case "update_attempt":
                await box.store.update_attempt(*ids_of(rollout), last_heartbeat_time=box.clock.now)
        assert (await box.attempt(rollout)).last_heartbeat_time == box.clock.now
    assert await box.pass_time(LEASE_S) == 1


async def test_a_heartbeat_that_does_not_name_an_attempt_lets_it_go(box: Box) -> None:
    lost, held = await box.take(), await box.take()
    await box.pass_time(LEASE_S - 1)
    assert await box.store.heartbeat("w", {"cpu": 1}, [ids_of(held)[1]]) == []
    assert await box.store.heartbeat("v", {"cpu": 1}, []) == []
    assert await box.pass_time(1) == 1
    assert [await box.status(lost), await box.status(held)] == [
        ("requeuing", "unresponsive"),
        ("preparing", "preparing"),
    ]


async def test_another_workers_heartbeat_renews_nothing(box: Box) -> None:
    rollout = await box.take("w")
    await box.pass_time(LEASE_S - 1)
    await box.store.update_worker("v")
    assert await box.pass_time(1) == 1
    assert await box.store.heartbeat("w", {}, ["at-none"]) == ["at-none"]
    assert await box.status(rollout) == ("requeuing", "unresponsive")


async def test_what_was_begun_by_hand_is_not_leased(box: Box) -> None:
    started = await box.store.start_rollout(1, worker_id="w")
    (rollout_id,) = await box.enqueue()
    await box.store.start_attempt(rollout_id)
    await box.store.add_span(span_of(started))
    await box.store.update_worker("w")
    assert await box.pass_time(1e9) == 0
    assert await box.status(started) == ("running", "running")


async def test_but_it_has_the_limits_of_its_config(box: Box) -> None:
    limited = await box.store.start_rollout(1, config=RolloutConfig(timeout_seconds=5))
    silent = await box.store.start_rollout(1, config=RolloutConfig(unresponsive_seconds=5))
    assert await box.pass_time(5) == 2
    assert [await box.status(limited), await box.status(silent)] == [
        ("failed", "timeout"),
        ("failed", "unresponsive"),
    ]


# time that is not lived

JUMPS = [5 * 60, 86_400, -86_400, -5 * 60]


async def test_after_a_restart_a_lease_gets_a_new_period(tmp_path: Path) -> None:
    clock = Clock()
    async with open_box(tmp_path / "s.db", clock) as box:
        leased = await box.take(unresponsive_seconds=30)
        started = await box.store.start_rollout(1)
    clock.now += 1e6
    async with open_box(tmp_path / "s.db", clock) as box:
        assert await box.pass_time(29) == 0
        await box.store.add_span(span_of(leased))
        assert await box.pass_time(29) == 0
        assert await box.pass_time(1) == 1
        assert [await box.status(leased), await box.status(started)] == [
            ("failed", "unresponsive"),
            ("preparing", "preparing"),
        ]


@pytest.mark.parametrize("away", [0, 99, 1e6])
async def test_what_a_dead_run_left_is_lost_to_the_infrastructure_and_tried_again(
    tmp_path: Path, away: float
) -> None:
    clock = Clock()
    async with open_box(tmp_path / "s.db", clock) as box:
        rollout = await box.take(timeout_seconds=100, unresponsive_seconds=10)
        await box.pass_time(9)
    clock.now += away
    async with open_box(tmp_path / "s.db", clock) as box:
        assert await box.pass_time(LEASE_S - 1) == 0
        assert await box.pass_time(LEASE_S) == 1
        assert await box.status(rollout) == ("requeuing", "unresponsive")
        assert (await box.attempt(rollout)).failure.kind == "infrastructure"
        second = await box.again("v")
        assert (await box.store.finish_attempt(second, "succeeded")).status == "succeeded"
        await box.pass_time(100)
        first = await box.attempt(rollout)
        assert (first.status, first.failure.kind) == ("failed", "infrastructure")
        assert await box.count("attempts_failed_timeout") == 0


async def test_a_worker_that_outlives_the_store_keeps_its_attempts_and_their_timeouts(tmp_path: Path) -> None:
    clock = Clock()
    async with open_box(tmp_path / "s.db", clock) as box:
        rollout = await box.take(timeout_seconds=1000)
        await box.pass_time(0)
        for _ in range(16):
            await box.pass_time(50)
            await box.store.update_worker("w")
    clock.now += 1e6
    async with open_box(tmp_path / "s.db", clock) as box:
        for _ in range(3):
            await box.store.update_worker("w")
            assert await box.pass_time(50) == 0
        await box.store.update_worker("w")
        assert await box.pass_time(50) == 1, "it has lived for 1000 s"
        assert await box.status(rollout) == ("failed", "timeout")


async def test_what_agents_outside_the_run_execute_keeps_the_rest_of_its_time(tmp_path: Path) -> None:
    clock = Clock()
    config = RolloutConfig(timeout_seconds=100, unresponsive_seconds=60)
    async with open_box(tmp_path / "s.db", clock) as box:
        started = await box.store.start_rollout(1, config=config)
        assert await box.pass_time(55) == 0
    clock.now += 1e6
    async with open_box(tmp_path / "s.db", clock) as box:
        assert await box.pass_time(44) == 0
        assert await box.pass_time(1) == 1
        assert await box.status(started) == ("failed", "timeout")


async def test_nothing_expires_while_a_resumed_run_starts(tmp_path: Path) -> None:
    clock = Clock()
    async with open_box(tmp_path / "s.db", clock) as box:
        started = await box.store.start_rollout(1, config=RolloutConfig(timeout_seconds=100))
        await box.pass_time(90)
        await box.store.stop_time()
        assert await box.pass_time(1e6) == 0
        assert box.service._leases.next_deadline() is None
        await box.store.stop_time()
        await box.store.continue_time()
        await box.store.continue_time()
        assert await box.pass_time(9) == 0
        assert await box.pass_time(1) == 1
        assert await box.status(started) == ("failed", "timeout")


@pytest.mark.parametrize("seconds", JUMPS)
async def test_a_clock_that_is_set_moves_no_deadline(box: Box, seconds: float) -> None:
    limited = await box.take(timeout_seconds=50)
    silent = await box.take(unresponsive_seconds=50)
    budgeted = await box.take(max_seconds=50)
    lost = await box.take()
    await box.store.finish_attempt(lost, "failed", LOST)
    done = await box.take()
    await box.store.finish_attempt(done, "succeeded")
    await box.pass_time(49)
    box.clock.jump(seconds)
    assert await box.pass_time(0) == 0
    assert await box.store.check_budgets(budgeted.rollout_id, ids_of(budgeted)[1], {}) == (None, None, [])
    assert (await box.store.dequeue_rollout("v")).rollout_id == lost.rollout_id, "its delay is over"
    assert await box.pass_time(1) == 2
    assert [await box.status(limited), await box.status(silent)] == [
        ("failed", "timeout"),
        ("failed", "unresponsive"),
    ]
    spent, _, _ = await box.store.check_budgets(budgeted.rollout_id, ids_of(budgeted)[1], {})
    assert spent == "max_seconds"
    await box.store.report_outage("policy", box.clock.lived() - 10.0, "refused")
    assert await box.status(done) == ("succeeded", "succeeded"), "it ended 50 s before"
    assert (await box.store.get_rollout_by_id(done.rollout_id)).end_time == 1000.0


@pytest.mark.parametrize("seconds", JUMPS)
async def test_a_clock_that_is_set_between_two_processes_moves_no_deadline(
    tmp_path: Path, seconds: float
) -> None:
    clock = Clock()
    async with open_box(tmp_path / "s.db", clock) as box:
        started = await box.store.start_rollout(1, config=RolloutConfig(timeout_seconds=100))
        await box.pass_time(60)
    clock.jump(seconds)
    async with open_box(tmp_path / "s.db", clock) as box:
        assert await box.pass_time(39) == 0
        assert await box.pass_time(1) == 1
        assert await box.status(started) == ("failed", "timeout")


# silence and timeouts


async def test_an_attempt_that_takes_too_long_is_over_for_good(box: Box) -> None:
    rollout = await box.take(timeout_seconds=10)
    await box.store.add_span(span_of(rollout))
    assert await box.pass_time(9.9) == 0
    await box.store.add_span(span_of(rollout))
    assert await box.pass_time(0.1) == 1
    attempt = await box.attempt(rollout)
    assert (attempt.failure.kind, attempt.failure.error) == (
        "timeout",
        "TimeoutError: the attempt took longer than 10 s",
    )
    assert attempt.end_time == box.clock.now
    await box.store.add_span(span_of(rollout, "late"))
    assert (await box.store.finish_attempt(rollout, "succeeded")).status == "failed"
    assert await box.status(rollout) == ("failed", "timeout")
    assert await box.count("attempts_late") == 1
    assert len(await box.store.query_spans(rollout.rollout_id)) == 3  # its records are kept


async def test_silence_begins_anew_with_every_span_but_not_with_a_heartbeat(box: Box) -> None:
    rollout = await box.take(unresponsive_seconds=10)
    for _ in range(3):
        assert await box.pass_time(9) == 0
        await box.store.add_span(span_of(rollout))
    await box.pass_time(9)
    assert await box.store.heartbeat("w", {}, [ids_of(rollout)[1]]) == []
    assert await box.pass_time(1) == 1
    assert await box.status(rollout) == ("failed", "unresponsive")
    assert (await box.attempt(rollout)).failure.error == "Unresponsive: no span or call arrived for 10 s"


@pytest.mark.parametrize("retried", [False, True])
@pytest.mark.parametrize("why", ["silence", "lease"])
async def test_a_span_revives_an_unresponsive_attempt(box: Box, why: str, retried: bool) -> None:
    config = (
        {"max_attempts": 2, "retry_condition": {"unresponsive"}} if retried else {"infrastructure_retries": 0}
    )
    rollout = await box.take(**config, **({"unresponsive_seconds": 10} if why == "silence" else {}))
    await box.pass_time(LEASE_S)
    assert await box.status(rollout) == ("requeuing" if retried else "failed", "unresponsive")
    assert await box.store.heartbeat("w", {}, [ids_of(rollout)[1]]) == []
    await box.store.add_span(span_of(rollout))
    assert await box.status(rollout) == ("running", "running")
    attempt = await box.attempt(rollout)
    assert (attempt.failure, attempt.end_time) == (None, None)
    assert (await box.store.get_rollout_by_id(rollout.rollout_id)).end_time is None
    assert await box.store.dequeue_rollout() is None
    assert await box.count("attempts_revived") == 1
    assert (await box.store.get_worker_by_id("w")).status == "busy"
    assert await box.pass_time(LEASE_S) == 1, "its lease and its time until unresponsive restart"


async def test_an_attempt_that_was_lost_and_found_again_is_not_counted_as_lost(box: Box) -> None:
    rollout = await box.take(max_attempts=1, retry_condition={"failed"})
    await box.pass_time(LEASE_S)
    await box.store.add_span(span_of(rollout))
    assert (await box.store.finish_attempt(rollout, "failed", BROKEN)).status == "failed"


async def test_an_unresponsive_attempt_may_succeed_at_once(box: Box) -> None:
    rollout = await box.take()
    await box.pass_time(LEASE_S)
    assert (await box.store.finish_attempt(rollout, "succeeded")).status == "succeeded"
    assert await box.store.dequeue_rollout() is None


async def test_once_another_has_begun_a_revived_attempt_decides_nothing(box: Box) -> None:
    first = await box.take()
    await box.pass_time(LEASE_S)
    second = await box.again("v")
    await box.store.add_span(span_of(first))
    assert await box.status(first) == ("preparing", "preparing")
    assert (await box.attempt(first)).status == "running"
    assert await box.store.heartbeat("w", {}, [ids_of(first)[1]]) == [ids_of(first)[1]]
    await box.store.finish_attempt(first, "succeeded")
    assert await box.status(first) == ("preparing", "preparing")
    assert (await box.store.finish_attempt(second, "failed", BROKEN)).status == "failed"


async def test_only_the_attempt_that_decides_a_rollout_leaves_metadata(box: Box) -> None:
    async def finish(rollout: Rollout, status: Any, failure: Failure | None = None) -> JsonObject:
        await box.store.finish_attempt(rollout, status, failure, rollout_metadata={"by": ids_of(rollout)[1]})
        return (await box.store.get_rollout_by_id(rollout.rollout_id)).metadata

    first = await box.take(max_attempts=2, retry_condition={"failed"})
    assert await finish(first, "failed", BROKEN) == {}
    second = await box.again()
    await box.pass_time(LEASE_S)
    third = await box.again("v")
    assert await finish(second, "succeeded") == {}
    decided = {"by": ids_of(third)[1]}
    assert await finish(third, "failed", BROKEN) == decided
    assert await finish(first, "succeeded") == await finish(second, "succeeded") == decided
    cancelled = await box.take()
    await box.store.cancel_rollout(cancelled.rollout_id)
    assert await finish(cancelled, "succeeded") == {}
    by_hand = await box.take()
    await box.store.update_rollout(by_hand.rollout_id, status="failed", metadata={"by": "hand"})
    assert await finish(by_hand, "succeeded") == {"by": "hand"}
    silent = await box.take(unresponsive_seconds=5)
    await box.pass_time(5)
    assert await finish(silent, "failed", BROKEN) == {"by": ids_of(silent)[1]}


async def test_a_late_report_leaves_the_metadata_of_an_attempt_that_timed_out(box: Box) -> None:
    late = await box.take(timeout_seconds=5)
    by_hand = await box.take(timeout_seconds=5)
    await box.pass_time(1)
    await box.store.update_rollout(by_hand.rollout_id, status="failed", metadata={"by": "hand"})
    await box.pass_time(4)
    for rollout in (late, by_hand):
        await box.store.finish_attempt(rollout, "failed", BROKEN, rollout_metadata={"by": "agent"})
    found = await box.store.query_rollouts()
    assert [rollout.metadata for rollout in found] == [{"by": "agent"}, {"by": "hand"}]


async def test_a_runner_reports_a_timeout_itself(box: Box) -> None:
    await box.store.heartbeat("w", {}, [])
    reported, hung = [await box.take(timeout_seconds=5, unresponsive_seconds=5) for _ in range(2)]
    assert await box.pass_time(5) == 0
    timeout = Failure(kind="timeout", error="TimeoutError: too long")
    await box.store.finish_attempt(reported, "timeout", timeout, rollout_metadata={"by": "agent"})
    assert await box.status(reported) == ("failed", "timeout")
    assert (await box.store.get_rollout_by_id(reported.rollout_id)).metadata == {"by": "agent"}
    assert await box.count("attempts_late") == 0
    assert await box.pass_time(TIMEOUT_GRACE_S - 0.1) == 0
    assert await box.pass_time(0.1) == 1
    assert await box.status(hung) == ("failed", "timeout")


async def test_the_late_timeout_of_an_unresponsive_attempt_does_not_kill_the_requeued_rollout(
    box: Box,
) -> None:
    rollout = await box.take(
        timeout_seconds=100, max_attempts=2, retry_condition={"unresponsive"}, unresponsive_seconds=10
    )
    assert await box.pass_time(10) == 1
    assert await box.pass_time(90) == 1
    assert (await box.attempt(rollout)).status == "timeout"
    assert (await box.status(rollout))[0] == "requeuing"
    await box.store.add_span(span_of(rollout))  # and now it is too late to come back
    assert await box.status(rollout) == ("requeuing", "timeout")
    second = await box.again()
    assert (await box.store.finish_attempt(second, "succeeded")).status == "succeeded"
    assert await box.pass_time(1e6) == 0


async def test_a_late_failure_of_an_unresponsive_attempt_does_not_kill_it_either(box: Box) -> None:
    rollout = await box.take()
    await box.pass_time(LEASE_S)
    assert (await box.store.finish_attempt(rollout, "failed", BROKEN)).status == "requeuing"
    assert (await box.again()).attempt.sequence_id == 2


async def test_limits_that_are_changed_hold_for_the_attempt_that_runs(box: Box) -> None:
    shorter, longer, never = [await box.take(timeout_seconds=50, unresponsive_seconds=40) for _ in range(3)]
    await box.store.update_rollout(shorter.rollout_id, config=RolloutConfig(timeout_seconds=5))
    await box.store.update_rollout(longer.rollout_id, config=RolloutConfig(timeout_seconds=55))
    await box.store.update_rollout(never.rollout_id, config=RolloutConfig())
    assert await box.pass_time(5) == 1
    assert await box.pass_time(49) == 0
    assert await box.pass_time(1) == 1
    assert await box.pass_time(5) == 1
    statuses = [(await box.attempt(rollout)).status for rollout in (shorter, longer, never)]
    assert statuses == ["timeout", "timeout", "unresponsive"]
    assert (await box.attempt(never)).failure.kind == "infrastructure"


async def test_no_limit_and_an_infinite_one_are_the_same(box: Box) -> None:
    rollout = await box.store.start_rollout(
        1, config=RolloutConfig(timeout_seconds=float("inf"), unresponsive_seconds=float("inf"))
    )
    assert await box.pass_time(1e12) == 0
    assert await box.status(rollout) == ("preparing", "preparing")


async def test_all_that_is_due_ends_together(box: Box) -> None:
    await box.enqueue(300, timeout_seconds=5)
    await box.enqueue(1)
    assert len(await box.store.dequeue_many_rollouts(limit=400, worker_id="w")) == 301
    assert await box.pass_time(5) == 300
    assert (await box.count("rollouts_failed"), await box.count("rollouts_preparing")) == (300, 1)
    assert await box.pass_time(0) == 0
