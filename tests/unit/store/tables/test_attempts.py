"""Attempts of the store: how they begin and end, and how the latest one decides its rollout."""

from typing import Any

import pytest
from pydantic import ValidationError
from store_helpers import BROKEN, LOST, Box, call_of, ids_of, reward_of, span_of
from unit_helpers import make_generation

from raylight.errors import InvalidTransitionError, UnknownIdError
from raylight.types import ATTEMPT_TRANSITIONS, Failure

# going on


async def test_the_first_span_makes_both_running(box: Box) -> None:
    rollout = await box.take()
    assert await box.status(rollout) == ("preparing", "preparing")
    box.clock.now += 5
    await box.store.add_span(span_of(rollout))
    assert await box.status(rollout) == ("running", "running")
    assert (await box.attempt(rollout)).last_heartbeat_time == box.clock.now


async def test_the_first_call_makes_both_running(box: Box) -> None:
    rollout = await box.take()
    await box.store.capture([(call_of(rollout), 0.0)], [])
    assert await box.status(rollout) == ("running", "running")


# ending


@pytest.mark.parametrize(
    ("status", "expected"), [("succeeded", "succeeded"), ("failed", "failed"), ("timeout", "failed")]
)
async def test_an_attempt_ends_with_its_last_spans_in_one_step(box: Box, status: str, expected: str) -> None:
    rollout = await box.take()
    box.clock.now += 5
    failure = None if status == "succeeded" else BROKEN
    spans = [span_of(rollout), reward_of(rollout, 0.5)]
    decided = await box.store.finish_attempt(rollout, status, failure, spans, {"dropped": 3})
    attempt = decided.attempt
    assert (decided.status, decided.end_time) == (expected, box.clock.now)
    assert (attempt.status, attempt.failure, attempt.end_time) == (status, failure, box.clock.now)
    assert attempt.metadata == {"dropped": 3}
    assert [span.sequence_id for span in await box.store.query_spans(rollout.rollout_id)] == [1, 2]
    assert (await box.store.collect([rollout.rollout_id]))[0].reward == 0.5


async def test_finishing_twice_changes_nothing(box: Box) -> None:
    rollout = await box.take()
    spans = [span_of(rollout)]
    first = await box.store.finish_attempt(rollout, "succeeded", None, spans)
    box.clock.now += 1
    assert await box.store.finish_attempt(rollout, "succeeded", None, spans) == first
    assert await box.store.finish_attempt(rollout, "failed", BROKEN) == first
    assert await box.count("attempts_late") == 1
    assert await box.store.finish_attempt(rollout, "failed", BROKEN, spans) == first
    assert await box.count("attempts_late") == 1, "with nothing but stored spans it is the same end again"
    assert (await box.count("total_spans"), await box.count("spans_duplicate")) == (1, 2)


@pytest.mark.parametrize("status", ["preparing", "running", "unresponsive", "done", None])
async def test_only_a_final_status_finishes(box: Box, status: Any) -> None:
    rollout = await box.take()
    with pytest.raises(InvalidTransitionError, match="does not finish"):
        await box.store.finish_attempt(rollout, status, None, [span_of(rollout)])
    assert await box.status(rollout) == ("preparing", "preparing")
    assert await box.count("total_spans") == 0


async def test_an_attempt_that_is_not_the_latest_decides_nothing(box: Box) -> None:
    first = await box.take()
    await box.store.release_worker("w", "died")
    second = await box.again("v")
    assert (await box.attempt(second, 1)).failure.error == "RunnerLost: died"
    late = await box.store.finish_attempt(first, "succeeded", None, [reward_of(first, 9.0)])
    assert (late.status, late.attempt.attempt_id) == ("preparing", ids_of(second)[1])
    assert (await box.store.collect([first.rollout_id]))[0].reward is None
    assert await box.store.heartbeat("w", {}, [ids_of(first)[1]]) == [ids_of(first)[1]]
    assert (
        await box.store.finish_attempt(second, "succeeded", None, [reward_of(second, 1.0)])
    ).status == "succeeded"
    assert (await box.store.collect([first.rollout_id]))[0].reward == 1.0


# trying again


@pytest.mark.parametrize("again", [["failed"], ["timeout"], ["failed", "timeout", "unresponsive"], []])
@pytest.mark.parametrize("status", ["failed", "timeout"])
async def test_what_the_retry_condition_names_is_tried_again_while_attempts_are_left(
    box: Box, status: str, again: list[str]
) -> None:
    rollout = await box.take(max_attempts=3, retry_condition=set(again))
    tries = 3 if status in again else 1
    for sequence_id in range(1, tries + 1):
        assert rollout.attempt.sequence_id == sequence_id
        decided = await box.store.finish_attempt(rollout, status, BROKEN)
        assert decided.status == ("failed" if sequence_id == tries else "requeuing")
        if sequence_id < tries:
            rollout = await box.again()
    assert await box.store.dequeue_rollout() is None


async def test_failures_of_the_infrastructure_are_tried_again_under_the_default_config(box: Box) -> None:
    rollout = await box.take()
    for _ in range(2):
        assert (await box.store.finish_attempt(rollout, "failed", LOST)).status == "requeuing"
        rollout = await box.again()
    assert (await box.store.finish_attempt(rollout, "failed", LOST)).status == "failed"


async def test_failures_of_the_infrastructure_use_up_no_attempts(box: Box) -> None:
    rollout = await box.take(max_attempts=2, retry_condition={"failed"}, infrastructure_retries=1)
    for failure, expected in ((LOST, "requeuing"), (BROKEN, "requeuing"), (BROKEN, "failed")):
        assert (await box.store.finish_attempt(rollout, "failed", failure)).status == expected
        rollout = await box.again() if expected == "requeuing" else rollout


async def test_more_failures_of_the_infrastructure_than_allowed_count_as_attempts(box: Box) -> None:
    rollout = await box.take(max_attempts=3, retry_condition={"failed"}, infrastructure_retries=1)
    for expected in ("requeuing", "requeuing", "requeuing", "failed"):
        assert (await box.store.finish_attempt(rollout, "failed", LOST)).status == expected
        rollout = await box.again() if expected == "requeuing" else rollout


async def test_an_attempt_by_hand(box: Box) -> None:
    (rollout_id,) = await box.enqueue()
    first = await box.store.start_attempt(rollout_id, "me")
    assert (first.status, first.attempt.sequence_id, first.attempt.worker_id) == ("preparing", 1, "me")
    assert await box.store.dequeue_rollout() is None
    second = await box.store.start_attempt(rollout_id)
    assert second.attempt.sequence_id == 2
    await box.store.finish_attempt(first, "failed", BROKEN)
    assert await box.status(rollout_id) == ("preparing", "preparing")
    done = await box.store.finish_attempt(second, "succeeded")
    third = await box.store.start_attempt(rollout_id)
    assert (done.status, third.status, third.end_time, third.attempt.sequence_id) == (
        "succeeded",
        "preparing",
        None,
        3,
    )
    assert [attempt.status for attempt in await box.store.query_attempts(rollout_id)] == [
        "failed",
        "succeeded",
        "preparing",
    ]
    with pytest.raises(UnknownIdError, match="ro-none"):
        await box.store.start_attempt("ro-none")
    assert await box.count("total_attempts") == 3


# changing by hand


async def test_what_is_not_given_of_an_attempt_stays(box: Box) -> None:
    rollout = await box.take("w")
    before = await box.attempt(rollout)
    assert await box.store.update_attempt(*ids_of(rollout)) == before
    changed = await box.store.update_attempt(*ids_of(rollout), metadata={"a": {1}})
    assert changed == before.model_copy(update={"metadata": {"a": {1}}})
    changed = await box.store.update_attempt(
        rollout.rollout_id, "latest", metadata=None, last_heartbeat_time=7.0
    )
    assert (changed.metadata, changed.last_heartbeat_time, changed.worker_id) == (None, 7.0, "w")
    assert changed == await box.store.get_latest_attempt(rollout.rollout_id)


async def test_an_attempt_is_handed_to_another_worker(box: Box) -> None:
    rollout = await box.take("a")
    box.clock.now += 5
    assert (await box.store.update_attempt(*ids_of(rollout), worker_id="b")).worker_id == "b"
    a, b = [await box.store.get_worker_by_id(name) for name in "ab"]
    assert (a.status, a.current_attempt_id, a.last_idle_time) == ("idle", None, box.clock.now)
    assert (b.status, b.current_attempt_id, b.last_busy_time) == ("busy", ids_of(rollout)[1], box.clock.now)
    assert await box.store.release_worker("a", "died") == 0
    assert await box.store.release_worker("b", "died") == 1


async def test_a_final_status_by_hand_decides_the_rollout(box: Box) -> None:
    rollout = await box.take(max_attempts=2, retry_condition={"failed"})
    changed = await box.store.update_attempt(rollout.rollout_id, "latest", status="failed", failure=BROKEN)
    assert (changed.status, changed.failure, changed.end_time) == ("failed", BROKEN, box.clock.now)
    assert (await box.status(rollout))[0] == "requeuing"
    assert (await box.store.get_worker_by_id("w")).status == "idle"


async def bring_to(box: Box, status: str) -> Any:
    rollout = await box.take()
    if status != "preparing":
        await box.store.update_attempt(*ids_of(rollout), status=status)
    return rollout


@pytest.mark.parametrize("after", sorted(ATTEMPT_TRANSITIONS))
@pytest.mark.parametrize("before", sorted(ATTEMPT_TRANSITIONS))
async def test_an_attempts_status_changes_as_the_table_says(box: Box, before: str, after: str) -> None:
    rollout = await bring_to(box, before)
    if after in ATTEMPT_TRANSITIONS[before] or after == before:
        assert (await box.store.update_attempt(*ids_of(rollout), status=after)).status == after
    else:
        with pytest.raises(InvalidTransitionError, match=f"{before} -> {after}"):
            await box.store.update_attempt(*ids_of(rollout), status=after, metadata={"a": 1})
        attempt = await box.attempt(rollout)
        assert (attempt.status, attempt.metadata) == (before, None)


async def test_wrong_changes_of_an_attempt_change_nothing(box: Box) -> None:
    rollout = await box.take()
    rollout_id, attempt_id = ids_of(rollout)
    (other,) = await box.enqueue()
    before = await box.attempt(rollout)
    for ids in (
        ("ro-none", attempt_id),
        (rollout_id, "at-none"),
        (other, attempt_id),
        (other, "latest"),
        ("ro-none", "latest"),
    ):
        with pytest.raises(UnknownIdError, match=f"{ids[0]}|{ids[1]}"):
            await box.store.update_attempt(*ids, worker_id="x")
    for status in ("done", None):
        with pytest.raises(InvalidTransitionError):
            await box.store.update_attempt(rollout_id, attempt_id, status=status, worker_id="x")
    for fields in ({}, {"status": "running"}, {"status": "succeeded"}):
        with pytest.raises(InvalidTransitionError, match="a failure requires the status"):
            await box.store.update_attempt(rollout_id, attempt_id, failure=BROKEN, **fields)
    for fields in ({"last_heartbeat_time": "soon"}, {"worker_id": 5}, {"metadata": [1]}):
        with pytest.raises(ValidationError):
            await box.store.update_attempt(rollout_id, attempt_id, **fields)
    assert await box.attempt(rollout) == before


async def test_success_with_open_calls_is_refused_by_hand(box: Box) -> None:
    rollout = await box.take()
    key = call_of(rollout)
    await box.store.capture([(key, 0.0)], [])
    with pytest.raises(InvalidTransitionError, match="1 calls are open"):
        await box.store.update_attempt(*ids_of(rollout), status="succeeded")
    await box.store.capture([], [(key, make_generation([1], [2], key=key), None)])
    await box.store.update_attempt(*ids_of(rollout), status="succeeded")
    assert await box.status(rollout) == ("succeeded", "succeeded")


async def test_a_failure_is_kept_word_for_word(box: Box) -> None:
    rollout = await box.take()
    failure = Failure(kind="agent", error="ValueError: \udcff \0 ' \U0001f600", trace="line\nline\ud800")
    decided = await box.store.finish_attempt(rollout, "failed", failure)
    assert decided.attempt.failure == failure
    assert await box.count("attempts_failed_agent") == 1


async def test_the_latest_attempt(box: Box) -> None:
    (rollout_id,) = await box.enqueue()
    assert await box.store.get_latest_attempt(rollout_id) is None
    assert await box.store.query_attempts(rollout_id) == []
    for sequence_id in (1, 2):
        await box.store.start_attempt(rollout_id)
        assert (await box.store.get_latest_attempt(rollout_id)).sequence_id == sequence_id
    with pytest.raises(UnknownIdError, match="ro-none"):
        await box.store.get_latest_attempt("ro-none")
