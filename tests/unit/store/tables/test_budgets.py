"""Budgets in the store: what an attempt has used, and the mark of a truncated one."""

from dataclasses import replace
from pathlib import Path

import pytest
from store_helpers import BROKEN, Box, begun, call_of, ids_of, open_box
from unit_helpers import make_generation

from raylight.types import CallKey, Failure, Rollout

TRUNCATED = Failure(kind="truncated", error="RolloutTruncated: spent")


async def record(
    box: Box, rollout: Rollout, tokens: int = 3, reason: str = "stop", start: float = 0.0
) -> CallKey:
    """Open and close a call of a rollout's attempt."""
    key = call_of(rollout)
    generation = replace(make_generation([1], [2] * tokens, key=key, start=start), finish_reason=reason)
    await box.store.capture([(key, start)], [(key, generation, None)])
    return key


async def check(box: Box, rollout: Rollout, **unrecorded: int) -> tuple[str | None, int | None]:
    spent, left, _ = await box.store.check_budgets(*ids_of(rollout), unrecorded)
    return spent, left


async def test_turns_are_answered_requests_and_those_in_flight(box: Box) -> None:
    rollout = await box.take(max_turns=3)
    assert await check(box, rollout) == (None, None)
    await record(box, rollout, start=1.0)
    await record(box, rollout, start=2.0, reason="aborted")  # the client sends it again
    both = [call_of(rollout), call_of(rollout)]
    await box.store.capture([(key, 3.0) for key in both], [])  # two choices of a request
    assert await check(box, rollout) == (None, None)
    open_call = call_of(rollout)
    await box.store.capture([(open_call, 4.0)], [])
    assert (await box.attempt(rollout)).truncated is None
    assert await check(box, rollout) == ("max_turns", None)
    assert (await box.attempt(rollout)).truncated == "max_turns"
    await box.store.capture([], [(open_call, None, None)])  # it failed
    assert await check(box, rollout) == (None, None)


async def test_tokens_of_calls_that_are_not_recorded_yet_count(box: Box) -> None:
    rollout = await box.take(max_tokens=10)
    assert await check(box, rollout) == (None, 10)
    key = await record(box, rollout, 4)
    assert await check(box, rollout) == (None, 6)
    asked = {key.call_id: 4, "other": 5}
    assert await box.store.check_budgets(*ids_of(rollout), asked) == (None, 1, [key.call_id])
    assert await check(box, rollout, other=6) == ("max_tokens", 0)
    await record(box, rollout, 2, "aborted")
    assert await check(box, rollout) == (None, 4)


async def test_the_time_is_that_of_the_attempt(box: Box) -> None:
    rollout = await box.take(max_seconds=5)
    box.clock.now += 4.9
    assert await check(box, rollout) == (None, None)
    box.clock.now += 0.1
    assert await check(box, rollout) == ("max_seconds", None)


async def test_the_first_budget_stays_the_mark(box: Box) -> None:
    rollout = await box.take(max_seconds=5, max_turns=1)
    await record(box, rollout)
    assert (await check(box, rollout))[0] == "max_turns"
    box.clock.now += 6
    assert (await check(box, rollout))[0] == "max_seconds"
    assert (await box.attempt(rollout)).truncated == "max_turns"
    assert await box.store.find_truncation(rollout) == "max_turns"


@pytest.mark.parametrize(("reason", "truncated"), [("length", "max_tokens"), ("stop", None)])
async def test_an_answer_cut_by_the_budget_is_a_truncation(
    box: Box, reason: str, truncated: str | None
) -> None:
    rollout = await box.take(max_tokens=5)
    await record(box, rollout, 2)
    assert await box.store.find_truncation(rollout) is None
    key = call_of(rollout)
    await box.store.capture([(key, 1.0)], [])
    found = await begun(box.store.find_truncation(rollout))  # it waits for the record
    generation = replace(make_generation([1], [2] * 3, key=key, start=1.0), finish_reason=reason)
    await box.store.capture([], [(key, generation, None)])
    assert await found == truncated
    await box.store.finish_attempt(rollout, "succeeded", losses={"spans_dropped": 2}, truncated=truncated)
    attempt = await box.attempt(rollout)
    assert attempt.truncated == truncated
    assert attempt.metadata["spans_dropped"] == 2


async def test_a_truncated_failure_is_not_retried(box: Box) -> None:
    config = {"max_attempts": 3, "retry_condition": ["failed"], "max_turns": 1}
    rollout = await box.take(**config)
    assert (await box.store.finish_attempt(rollout, "failed", BROKEN)).status == "requeuing"
    again = await box.again()
    done = await box.store.finish_attempt(again, "failed", TRUNCATED, truncated="max_turns")
    assert done.status == "failed"
    assert done.attempt.truncated == "max_turns"


async def test_each_attempt_has_its_own_budgets(box: Box) -> None:
    rollout = await box.take(max_attempts=2, retry_condition=["failed"], max_turns=1)
    await record(box, rollout)
    assert (await check(box, rollout))[0] == "max_turns"
    await box.store.finish_attempt(rollout, "failed", BROKEN)
    assert await check(box, await box.again()) == (None, None)


async def test_attempts_without_budgets_unknown_or_decided_ones_are_not_limited(box: Box) -> None:
    rollout = await box.take()
    await record(box, rollout, 1000)
    assert await check(box, rollout) == (None, None)
    assert await box.store.check_budgets("ro-x", "at-x", {}) == (None, None, [])
    limited = await box.take(max_turns=1)
    await record(box, limited)
    await box.store.finish_attempt(limited, "succeeded")
    assert await check(box, limited) == (None, None)


async def test_the_counts_survive_a_restart(tmp_path: Path) -> None:
    async with open_box(tmp_path / "store.db") as box:
        rollout = await box.take(max_tokens=10)
        await record(box, rollout, 4)
        assert await check(box, rollout) == (None, 6)
    async with open_box(tmp_path / "store.db") as box:
        assert await check(box, rollout) == (None, 6)
        await record(box, rollout, 6, "length")
        assert await box.store.find_truncation(rollout) == "max_tokens"
