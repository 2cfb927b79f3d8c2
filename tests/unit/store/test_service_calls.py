"""Calls to the engine in the store: announced, recorded, and waited for before an attempt is decided."""

import asyncio
import random
import uuid
from dataclasses import replace

import numpy as np
import pytest
from store_helpers import BROKEN, LEASE_S, LOST, Box, begun, call_of, ids_of, reward_of, span_of
from unit_helpers import make_generation, within

from raylight.errors import StoreError, UnknownIdError
from raylight.semconv import CALL_ID, PROMPT_TOKEN_IDS, RESPONSE_LOGPROBS, RESPONSE_TOKEN_IDS, WEIGHT_VERSIONS
from raylight.store import service
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.store.tables.transitions import HOLD
from raylight.types import REPEATED, CallKey, Generation, HistoryNote, Rollout


def sampled(key: CallKey, i: int = 0) -> Generation:
    return make_generation(
        [1, 2, i], [3, 2**31 - 1], key=key, logprobs=[-0.125, -1e-38], versions=[i, 2**40], start=float(i)
    )


async def record(box: Box, key: CallKey, i: int = 0) -> Generation:
    """A call, opened and closed."""
    await box.store.capture([(key, float(i))], [(key, sampled(key, i), None)])
    return sampled(key, i)


async def generations(box: Box, rollout: Rollout) -> list[Generation]:
    return (await box.store.collect([rollout.rollout_id]))[0].generations


async def test_a_generation_comes_back_token_for_token(box: Box) -> None:
    rollout = await box.take()
    key = call_of(rollout)
    assert await generations(box, rollout) == []
    made = await record(box, key)
    assert await generations(box, rollout) == [made]
    empty = make_generation([], [], key=call_of(rollout), start=5.0)
    await box.store.capture([(empty.key, 5.0)], [(empty.key, empty, None)])
    assert await generations(box, rollout) == [made, empty]
    note = HistoryNote("answer_edited", "edited", 2, 17, "was", "is")
    edited = replace(make_generation([1], [2], key=call_of(rollout), start=6.0), history=note)
    await box.store.capture([(edited.key, 6.0)], [(edited.key, edited, None)])
    assert await generations(box, rollout) == [made, empty, edited]


async def test_they_come_in_the_order_in_which_the_calls_began(box: Box) -> None:
    rollout = await box.take()
    keys = [call_of(rollout) for _ in range(8)]
    await box.store.capture([(key, float(i)) for i, key in reversed(list(enumerate(keys)))], [])
    closings = [(key, sampled(key, i), None) for i, key in enumerate(keys)]
    random.Random(3).shuffle(closings)
    for closing in closings:
        await box.store.capture([], [closing])
    assert [call.key for call in await generations(box, rollout)] == keys


async def test_a_call_is_recorded_once_however_often_it_is_sent(box: Box) -> None:
    rollout = await box.take()
    key = call_of(rollout)
    for _ in range(3):
        await record(box, key)
    await box.store.capture([(key, 0.0)], [])
    await box.store.capture([], [(key, make_generation([9], [9], key=key), None), (key, None, None)])
    assert await generations(box, rollout) == [sampled(key)]
    assert (await box.count("generations"), await box.count("generations_late")) == (1, 0)


async def test_a_record_that_cannot_be_stored_fails_alone(box: Box) -> None:
    rollout = await box.take()
    keys = [call_of(rollout) for _ in range(3)]
    await box.store.capture([(key, 0.0) for key in keys], [])
    nobody = CallKey("ro-\ud800", "at-1", "c")  # it can be read by nobody, because it is not Unicode
    sent = [
        box.store.capture([], [(key, sampled(key, i), span_of(rollout, f"call {i}"))])
        for i, key in enumerate(keys)
    ]
    stored, failed = await asyncio.gather(
        asyncio.gather(*sent),
        box.store.capture([(nobody, 0.0)], [(nobody, sampled(nobody), None)]),
        return_exceptions=True,
    )
    assert stored == [[], [], []]
    assert isinstance(failed, StoreError)
    assert await generations(box, rollout) == [sampled(key, i) for i, key in enumerate(keys)]
    statistics = await box.store.statistics()
    assert (statistics["generations"], statistics["total_spans"]) == (3, 3)


async def test_a_call_that_sampled_nothing_leaves_nothing(box: Box) -> None:
    rollout = await box.take()
    key = call_of(rollout)
    await box.store.capture([(key, 0.0)], [])
    for _ in range(2):
        await box.store.capture([], [(key, None, None)])
    assert (await box.store.finish_attempt(rollout, "succeeded", timeout=0)).status == "succeeded"
    assert await generations(box, rollout) == []
    assert await box.count("generations_late") == 0


async def test_a_call_without_tokens_leaves_its_span(box: Box) -> None:
    """Its model runs elsewhere, or it failed. It is stored once, as the call is open only once."""
    rollout = await box.take()
    key, span = call_of(rollout), span_of(rollout, "elsewhere")
    assert await box.store.capture([(key, 0.0)], []) == []
    for _ in range(2):
        assert await box.store.capture([], [(key, None, span)]) == []
    assert (await box.store.finish_attempt(rollout, "succeeded", timeout=0)).status == "succeeded"
    assert [found.name for found in await box.store.query_spans(rollout.rollout_id)] == ["elsewhere"]
    assert await generations(box, rollout) == []
    assert (await box.count("spans_duplicate"), await box.count("generations_late")) == (0, 0)


async def test_calls_of_an_attempt_that_was_begun_again_elsewhere_are_refused(box: Box) -> None:
    first = await box.take()
    await box.store.release_worker("w", "died")
    second = await box.again("v")
    late, new = call_of(first), call_of(second)
    assert await box.store.capture([(late, 0.0), (new, 0.0)], []) == [late]


async def test_a_call_that_is_announced_again_is_not_refused_while_its_attempt_goes_on(box: Box) -> None:
    rollout = await box.take()
    key = call_of(rollout)
    for _ in range(2):
        assert await box.store.capture([(key, 0.0)], []) == []
    await box.store.finish_attempt(rollout, "failed", BROKEN, timeout=0)
    assert await box.store.capture([(key, 0.0)], []) == [key]


async def test_what_was_never_announced_is_counted_and_not_recorded(box: Box) -> None:
    rollout = await box.take()
    key = call_of(rollout)
    await box.store.capture([], [(key, sampled(key), None)])
    assert await generations(box, rollout) == []
    assert await box.count("generations_late") == 1


async def test_the_same_call_id_in_two_attempts_is_two_calls(box: Box) -> None:
    first, second = await box.take(), await box.take()
    keys = [call_of(rollout, "same") for rollout in (first, second)]
    await box.store.capture([(key, 0.0) for key in keys], [(keys[1], sampled(keys[1], 1), None)])
    assert await generations(box, first) == []
    assert await generations(box, second) == [sampled(keys[1], 1)]
    await box.store.capture([], [(keys[0], sampled(keys[0]), None)])
    assert await generations(box, first) == [sampled(keys[0])]


@pytest.mark.parametrize("ids", [("ro-none", "at-none"), (None, "at-none"), (None, "latest")])
async def test_calls_of_an_unknown_attempt_are_counted(box: Box, ids: tuple[str | None, str]) -> None:
    rollout = await box.take()
    wrong = CallKey(ids[0] or rollout.rollout_id, ids[1], "c")
    right = call_of(rollout)
    closed = [(wrong, sampled(wrong), None), (right, sampled(right), None)]
    assert await box.store.capture([(wrong, 0.0), (right, 0.0)], closed) == [wrong]
    assert await generations(box, rollout) == [sampled(right)]
    assert (await box.count("calls_late"), await box.count("generations_late")) == (1, 1)


@pytest.mark.parametrize("end", ["succeeded", "failed", "timeout", "released"])
async def test_what_comes_after_the_end_is_counted_and_kept_out(box: Box, end: str) -> None:
    rollout = await box.take(timeout_seconds=10)
    open_call, late_call = call_of(rollout), call_of(rollout)
    if end != "succeeded":
        await box.store.capture([(open_call, 0.0)], [])
    match end:
        case "timeout":
            await box.pass_time(10)
        case "released":
            await box.store.release_worker("w", "died")
        case _:
            await box.store.finish_attempt(rollout, end, BROKEN if end == "failed" else None, timeout=0)
    assert await box.count("calls_lost") == (end != "succeeded")
    await box.store.capture([], [(open_call, sampled(open_call), span_of(rollout))])
    assert await box.store.capture([(late_call, 0.0)], [(late_call, sampled(late_call), None)]) == [late_call]
    assert await generations(box, rollout) == []
    assert await box.store.query_spans(rollout.rollout_id) == []
    assert (await box.count("calls_late"), await box.count("generations_late")) == (1, 2)


async def test_a_late_record_is_kept_out_of_the_next_attempt(box: Box) -> None:
    first = await box.take()
    key = call_of(first)
    await box.store.capture([(key, 0.0)], [])
    await box.store.release_worker("w", "died")
    second = await box.again("v")
    await box.store.capture([], [(key, sampled(key), None)])
    own = await record(box, call_of(second), 1)
    await box.store.finish_attempt(second, "succeeded", timeout=0)
    assert await generations(box, first) == [own]


async def test_what_an_earlier_attempt_left_is_not_collected(box: Box) -> None:
    first = await box.take()
    await record(box, call_of(first))
    await box.store.finish_attempt(first, "failed", LOST, [reward_of(first, 5.0)])
    second = await box.again()
    await box.store.finish_attempt(second, "succeeded")
    (found,) = await box.store.collect([first.rollout_id], with_spans=True)
    assert (found.reward, found.generations, found.spans) == (None, [], [])
    assert found.rollout.attempt.sequence_id == 2


# finishing


async def test_finishing_waits_for_open_calls(box: Box) -> None:
    rollout = await box.take()
    keys = [call_of(rollout) for _ in range(2)]
    await box.store.capture([(key, 0.0) for key in keys], [])
    finishing = await begun(
        box.store.finish_attempt(rollout, "succeeded", None, [reward_of(rollout, 0.5)], timeout=60.0)
    )
    assert await box.status(rollout) == ("running", "running")
    assert await box.count("total_spans") == 0
    await box.store.capture([], [(keys[0], sampled(keys[0]), None)])
    await asyncio.sleep(0)
    assert not finishing.done()
    await box.store.capture([], [(keys[1], None, None)])
    async with within():
        assert (await finishing).status == "succeeded"
    (found,) = await box.store.collect([rollout.rollout_id])
    assert (found.reward, [call.key for call in found.generations]) == (0.5, keys[:1])


async def test_finishing_waits_for_a_call_that_is_opened_while_it_waits(box: Box) -> None:
    rollout = await box.take()
    first, second = call_of(rollout), call_of(rollout)
    await box.store.capture([(first, 0.0)], [])
    finishing = await begun(box.store.finish_attempt(rollout, "succeeded", timeout=60.0))
    await box.store.capture([(second, 1.0)], [(first, sampled(first), None)])
    for _ in range(20):
        await asyncio.sleep(0)
    assert not finishing.done()
    await box.store.capture([], [(second, sampled(second, 1), None)])
    async with within():
        assert (await finishing).status == "succeeded"
    assert len(await generations(box, rollout)) == 2


async def test_a_message_with_a_decision_waits_for_records_that_are_on_their_way(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "SETTLE_S", 60.0)
    monkeypatch.setattr(StoreService, "wait_for_records", None)
    rollout, other = await box.take(), await box.take()
    key = call_of(rollout)
    await box.store.capture([(key, 0.0)], [])
    finishing = await begun(box.store.finish_attempt(rollout, "succeeded"))
    async with within():
        elsewhere = StoreClient(box.service)  # another process
        assert (await elsewhere.finish_attempt(other, "succeeded")).status == "succeeded"
        assert not finishing.done()
        await elsewhere.capture([], [(key, sampled(key), None)])
        assert (await finishing).status == "succeeded"


async def test_a_message_with_a_decision_is_answered_soon_without_the_records(box: Box) -> None:
    rollout = await box.take()
    key = call_of(rollout)
    await box.store.capture([(key, 0.0)], [])
    finishing = await begun(box.store.finish_attempt(rollout, "succeeded", timeout=60.0))
    async with within():
        await box.store.update_worker("w")  # its message follows
        assert not finishing.done()
        await box.store.capture([], [(key, sampled(key), None)])
        assert (await finishing).status == "succeeded"


@pytest.mark.parametrize("timeout", [0.01, 0.0, -1.0])
async def test_a_success_whose_calls_never_end_is_a_failure_of_the_infrastructure(
    box: Box, timeout: float
) -> None:
    rollout = await box.take(infrastructure_retries=1)
    for expected in ("requeuing", "failed"):
        await box.store.capture([(call_of(rollout), 0.0)], [])
        async with within():
            decided = await box.store.finish_attempt(
                rollout, "succeeded", None, [reward_of(rollout, 1.0)], timeout=timeout
            )
        assert (decided.status, decided.attempt.failure.kind) == (expected, "infrastructure")
        assert (
            decided.attempt.failure.error == f"LostGeneration: calls were not recorded within {timeout:g} s"
        )
        rollout = await box.again() if expected == "requeuing" else rollout
    assert await box.count("calls_lost") == 2


async def test_a_failure_keeps_its_reason_when_calls_never_end(box: Box) -> None:
    rollout = await box.take()
    await box.store.capture([(call_of(rollout), 0.0)], [])
    decided = await box.store.finish_attempt(rollout, "failed", BROKEN, [span_of(rollout)], timeout=0.01)
    assert (decided.status, decided.attempt.failure) == ("failed", BROKEN)
    assert await box.count("total_spans") == 1


async def test_an_attempt_that_runs_out_of_time_meanwhile_is_not_waited_for(box: Box) -> None:
    rollout = await box.take(timeout_seconds=10)
    await box.store.capture([(call_of(rollout), 0.0)], [])
    finishing = await begun(box.store.finish_attempt(rollout, "succeeded", timeout=60.0))
    await box.pass_time(10)
    async with within():
        assert (await finishing).attempt.status == "timeout"
        assert (
            await box.store.finish_attempt(rollout, "succeeded", timeout=60.0)
        ).attempt.status == "timeout"


async def test_an_unresponsive_attempt_keeps_its_open_calls(box: Box) -> None:
    rollout = await box.take()
    key = call_of(rollout)
    await box.store.capture([(key, 0.0)], [])
    await box.pass_time(LEASE_S)
    await box.store.capture([], [(key, sampled(key), span_of(rollout))])
    assert await box.status(rollout) == ("running", "running")
    assert len(await generations(box, rollout)) == 1


# reading


async def test_the_spans_of_calls_are_read_with_their_tokens(box: Box) -> None:
    rollout = await box.take()
    key, other = call_of(rollout), call_of(rollout)
    span = span_of(rollout, "chat", attributes={CALL_ID: key.call_id, "x": 1})
    odd = [span_of(rollout, attributes={CALL_ID: value}) for value in ("unknown", ["a"], 5, None)]
    await box.store.capture(
        [(key, 0.0), (other, 1.0)], [(key, sampled(key), span), (other, sampled(other, 1), None)]
    )
    await box.store.add_many_spans(odd)
    tokens = {
        PROMPT_TOKEN_IDS: [1, 2, 0],
        RESPONSE_TOKEN_IDS: [3, 2**31 - 1],
        RESPONSE_LOGPROBS: [-0.125, float(np.float32(-1e-38))],
        WEIGHT_VERSIONS: [0, 2**40],
    }
    for spans in (
        await box.store.query_spans(rollout.rollout_id),
        await box.store.query_spans(rollout.rollout_id, ids_of(rollout)[1]),
        (await box.store.collect([rollout.rollout_id], with_spans=True))[0].spans,
    ):
        assert spans[0].attributes == {CALL_ID: key.call_id, "x": 1} | tokens
        assert [span.attributes for span in spans[1:]] == [span.attributes for span in odd]
    (item,) = await box.store.collect([rollout.rollout_id], with_spans=True, with_span_tokens=False)
    assert item.spans[0].attributes == {CALL_ID: key.call_id, "x": 1}
    await box.store.start_attempt(rollout.rollout_id)
    assert (await box.store.query_spans(rollout.rollout_id, limit=1))[0].attributes[PROMPT_TOKEN_IDS] == [
        1,
        2,
        0,
    ]


async def test_collecting(box: Box) -> None:
    waiting = (await box.enqueue())[0]
    rollout = await box.again()
    await box.store.finish_attempt(rollout, "succeeded", None, [span_of(rollout), reward_of(rollout, 1.0)])
    (other,) = await box.enqueue()
    found = await box.store.collect([other, waiting, other])
    assert [(one.rollout.rollout_id, one.reward, one.spans) for one in found] == [
        (other, None, []),
        (waiting, 1.0, []),
        (other, None, []),
    ]
    (found_one,) = await box.store.collect([waiting], with_spans=True)
    assert [span.sequence_id for span in found_one.spans] == [1, 2]
    assert await box.store.collect([]) == []
    with pytest.raises(UnknownIdError, match="ro-none"):
        await box.store.collect([waiting, "ro-none"])


# recorders that are gone


def asked(rollout: Rollout, request: str) -> CallKey:
    return CallKey(rollout.rollout_id, rollout.attempt.attempt_id, uuid.uuid4().hex, request)


async def test_a_call_that_a_dead_recorder_had_fails_its_attempt_at_once_as_infrastructure(box: Box) -> None:
    rollout = await box.take()
    await box.store.capture([(asked(rollout, "hello"), 0.0)], [], "r1")
    async with within():
        finishing = asyncio.create_task(box.store.finish_attempt(rollout, "succeeded", timeout=3600))
        await asyncio.sleep(0)
        assert not finishing.done()
        await box.store.lose_recorder("r1")
        done = await finishing
    assert done.status in ("requeuing", "queuing", "failed")
    attempt = await box.attempt(rollout)
    assert (attempt.failure.kind, await box.count("calls_lost")) == ("infrastructure", 1)


@pytest.mark.parametrize("noticed_first", [True, False])
async def test_what_was_asked_again_elsewhere_was_not_answered_by_the_dead(
    box: Box, noticed_first: bool
) -> None:
    rollout = await box.take()
    again = asked(rollout, "hello" + REPEATED)
    await box.store.capture([(asked(rollout, "hello"), 0.0)], [], "r1")
    if noticed_first:
        await box.store.lose_recorder("r1")
    await box.store.capture([(again, 1.0)], [(again, sampled(again), None)], "r2")
    if not noticed_first:
        await box.store.lose_recorder("r1")
    async with within():
        assert (await box.store.finish_attempt(rollout, "succeeded", timeout=3600)).status == "succeeded"
    (finished,) = await box.store.collect([rollout.rollout_id])
    assert [call.key for call in finished.generations] == [again]
    assert await box.count("calls_repeated") == 1


async def test_each_repetition_stands_for_one_call(box: Box) -> None:
    rollout = await box.take()
    await box.store.capture([(asked(rollout, "hello"), 0.0) for _ in range(2)], [], "r1")
    again = [asked(rollout, "hello" + REPEATED) for _ in range(2)]
    await box.store.capture([(again[0], 1.0)], [], "r2")
    await box.store.lose_recorder("r1")
    await box.store.capture([], [(again[0], sampled(again[0]), None)], "r2")
    assert await box.count("calls_repeated") == 1
    await box.store.lose_recorder("r2")
    assert await box.count("calls_repeated") == 1
    await box.store.capture([(again[1], 2.0)], [(again[1], sampled(again[1]), None)], "r3")
    assert await box.count("calls_repeated") == 2
    async with within():
        assert (await box.store.finish_attempt(rollout, "succeeded", timeout=3600)).status == "succeeded"


async def test_a_repetition_that_was_lost_too_was_repeated_itself(box: Box) -> None:
    rollout = await box.take()
    for number, recorder in enumerate(("r1", "r2", "r3")):
        call = asked(rollout, "hello" + REPEATED * bool(number))
        await box.store.capture([(call, float(number))], [], recorder)
    await box.store.capture([], [(call, sampled(call), None)], "r3")
    await box.store.lose_recorder("r2")
    await box.store.lose_recorder("r1")
    assert await box.count("calls_repeated") == 2
    async with within():
        assert (await box.store.finish_attempt(rollout, "succeeded", timeout=3600)).status == "succeeded"


@pytest.mark.parametrize(
    ("request_id", "recorder", "start"),
    [
        ("hello", "r2", 1.0),
        ("other+", "r2", 1.0),
        ("hello+", "r1", 1.0),
        ("hello+", "r2", -1.0),
        ("", "r2", 1.0),
    ],
)
async def test_other_calls_say_nothing_of_the_dead_recorder_s(
    box: Box, request_id: str, recorder: str, start: float
) -> None:
    rollout = await box.take()
    other = asked(rollout, request_id)
    await box.store.capture([(asked(rollout, "hello" if request_id else ""), 0.0)], [], "r1")
    await box.store.capture([(other, start)], [(other, sampled(other), None)], recorder)
    await box.store.lose_recorder("r1")
    async with within():
        assert (await box.store.finish_attempt(rollout, "succeeded", timeout=3600)).status != "succeeded"


async def test_a_recorder_that_is_gone_begins_nothing(box: Box) -> None:
    rollout = await box.take()
    await box.store.lose_recorder("r1")
    key = asked(rollout, "hello")
    assert await box.store.capture([(key, 0.0)], [], "r1") == [key]


def hold_of(rollout: Rollout) -> CallKey:
    return CallKey(*ids_of(rollout), f"{HOLD}{uuid.uuid4().hex[:28]}")


async def test_an_attempt_succeeds_only_when_its_hold_is_released(box: Box) -> None:
    rollout = await box.take()
    hold, key = hold_of(rollout), call_of(rollout)
    await box.store.capture([(hold, 0.0)], [], "r1")
    async with within():
        finishing = asyncio.create_task(box.store.finish_attempt(rollout, "succeeded", timeout=3600))
        await asyncio.sleep(0)
        assert not finishing.done()
        await box.store.capture([(key, 1.0)], [(key, sampled(key), None), (hold, None, None)], "r1")
        assert (await finishing).status == "succeeded"
    assert await generations(box, rollout) == [sampled(key)]


@pytest.mark.parametrize("lost_first", [True, False])
async def test_the_hold_of_a_lost_recorder_is_never_released(box: Box, lost_first: bool) -> None:
    """It may have answered calls whose announcement was rejected."""
    rollout = await box.take()
    hold, late = hold_of(rollout), call_of(rollout)
    await box.store.capture([(hold, 0.0)], [], "r1")
    if not lost_first:
        await box.store.capture([(call_of(rollout), 0.0)], [], "r1")
    await box.store.lose_recorder("r1")
    assert await box.store.capture(
        [(late, 1.0)], [(late, sampled(late), None), (hold, None, None)], "r1"
    ) == [late]
    async with within():
        assert (await box.store.finish_attempt(rollout, "succeeded", timeout=3600)).status != "succeeded"
    assert (await box.attempt(rollout)).failure.kind == "infrastructure"
    assert await box.count("calls_lost") == (not lost_first)


async def test_holds_are_no_calls_in_counts(box: Box) -> None:
    rollout = await box.take()
    await box.store.capture([(hold_of(rollout), 0.0)], [])
    await box.store.finish_attempt(rollout, "failed", BROKEN, timeout=0)
    late = hold_of(rollout)
    assert await box.store.capture([(late, 0.0)], []) == [late]
    assert (await box.count("calls_lost"), await box.count("calls_late")) == (0, 0)
