"""The recorder: nothing is lost or sent twice, order holds, and capacity is bounded."""

import asyncio
import logging
import tracemalloc
from collections.abc import Mapping, Sequence

import pytest
from capture_helpers import Sink, settle
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import make_generation, make_key, until

from raylight.errors import SpanError, StoreLostError
from raylight.serving.capture import recorder as module
from raylight.serving.capture import retry_queue
from raylight.serving.capture.recorder import (
    AttemptFinishedError,
    ClosedCall,
    OpenedCall,
    OverloadedError,
    Recorder,
)
from raylight.types import CallKey, Span

pytestmark = pytest.mark.timeout(60)
SPAN = Span.from_attributes(name="s", attributes={})


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry_queue, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(retry_queue, "LONGEST_PAUSE_S", 0.002)
    monkeypatch.setattr(module, "LINGER_S", 0.0)
    monkeypatch.setattr(module, "HOLD_S", 0.0)
    monkeypatch.setattr(module, "INTERVAL_S", 0.0)


@pytest.fixture
def sink() -> Sink:
    return Sink()


@pytest.fixture
async def recorder(sink: Sink) -> Recorder:
    return Recorder(sink)


async def opened(recorder: Recorder, *keys: CallKey) -> None:
    await (await recorder.open(keys, 1.0))


async def test_a_call_is_known_when_the_store_has_it(sink: Sink, recorder: Recorder) -> None:
    sink.gate.clear()
    key = make_key()
    known = await recorder.open([key], 1.0)
    await settle()
    assert not known.done()
    assert recorder.stats.unsent == 1
    sink.gate.set()
    await known
    assert sink.opened == [(key, 1.0)]
    assert (recorder.stats.opened, recorder.stats.unsent) == (1, 0)


async def test_records_are_sent_in_order_in_batches_one_at_a_time(sink: Sink, recorder: Recorder) -> None:
    keys = [make_key() for _ in range(20)]
    closed: list[ClosedCall] = [(key, make_generation([1], [2], key=key), SPAN) for key in keys]
    known = [await recorder.open([key], float(start)) for start, key in enumerate(keys)]
    for record in closed:
        recorder.close([record])
    await asyncio.gather(*known)
    await sink.has(20, 20)
    assert sink.opened == [(key, float(start)) for start, key in enumerate(keys)]
    assert sink.closed == closed
    assert (sink.most_at_once, sink.tries) == (1, 2), "one message of announcements, then one of closings"


class Lanes(Sink):
    """A store that is slow or unreachable for one kind of message only."""

    def __init__(self) -> None:
        super().__init__()
        self.opens, self.closes = asyncio.Event(), asyncio.Event()
        self.opens.set()
        self.closes.set()
        self.opens_error: Exception | None = None
        self.messages: list[tuple[int, int]] = []

    async def __call__(self, opened: list[OpenedCall], closed: list[ClosedCall]) -> Sequence[CallKey]:
        self.messages.append((len(opened), len(closed)))
        await (self.opens if opened else self.closes).wait()
        if opened and self.opens_error:
            raise self.opens_error
        return await super().__call__(opened, closed)


@pytest.fixture
def lanes() -> Lanes:
    return Lanes()


async def test_an_announcement_is_not_held_up_by_a_slow_message_of_closings(lanes: Lanes) -> None:
    lanes.closes.clear()
    recorder, keys = Recorder(lanes), [make_key() for _ in range(4)]
    await opened(recorder, keys[0])
    recorder.close([(keys[0], None, SPAN)])
    await until(lambda: lanes.messages == [(1, 0), (0, 1)])
    await opened(recorder, keys[1])
    recorder.close([(keys[1], None, SPAN)])
    await opened(recorder, keys[2], keys[3])
    assert lanes.closed == []
    assert lanes.messages == [(1, 0), (0, 1), (1, 0), (2, 0)]
    recorder.close([(keys[2], None, SPAN), (keys[3], None, SPAN)])
    lanes.closes.set()
    await lanes.has(4, 4)
    assert lanes.messages[4:] == [(0, 3)], "what came while closings were under way goes together"
    assert [key for key, _, _ in lanes.closed] == keys


async def test_announcements_go_one_message_at_a_time_and_those_that_come_meanwhile_together(
    lanes: Lanes,
) -> None:
    lanes.opens.clear()
    recorder = Recorder(lanes)
    known = [await recorder.open([make_key()], 1.0)]
    await settle()
    for _ in range(3):
        known.append(await recorder.open([make_key()], 1.0))
        await settle()
    assert lanes.messages == [(1, 0)]
    lanes.opens.set()
    await asyncio.gather(*known)
    assert lanes.messages == [(1, 0), (3, 0)]


async def test_closings_linger_for_others_and_let_announcements_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 60.0)
    sink = Lanes()
    recorder, keys = Recorder(sink), [make_key() for _ in range(3)]
    for key in keys:
        await opened(recorder, key)
        recorder.close([(key, None, SPAN)])
        await settle()
    assert sink.messages == [(1, 0)] * 3
    assert await recorder.aclose() == 0
    assert sink.messages[3:] == [(0, 3)]


async def test_two_messages_of_closings_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INTERVAL_S", 60.0)
    sink = Lanes()
    recorder, keys = Recorder(sink), [make_key() for _ in range(3)]
    await opened(recorder, *keys)
    recorder.close([(keys[0], None, SPAN)])
    await sink.has(3, 1)
    for key in keys[1:]:
        recorder.close([(key, None, SPAN)])
        await settle()
    assert sink.messages == [(3, 0), (0, 1)]
    assert await recorder.aclose() == 0
    assert sink.messages == [(3, 0), (0, 1), (0, 2)]


async def test_closings_do_not_linger_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.01)
    sink, key = Lanes(), make_key()
    recorder = Recorder(sink)
    await opened(recorder, key)
    recorder.close([(key, None, SPAN)])
    await sink.has(1, 1)


async def test_a_full_batch_of_closings_does_not_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINGER_S", 60.0)
    monkeypatch.setattr(retry_queue, "MAX_BATCH", 2)
    sink = Lanes()
    recorder, keys = Recorder(sink), [make_key() for _ in range(3)]
    await opened(recorder, *keys)
    recorder.close([(keys[0], None, SPAN)])
    await settle()
    assert sink.closed == []
    recorder.close([(keys[1], None, SPAN)])
    await sink.has(3, 2)
    recorder.close([(keys[2], None, SPAN)])
    assert await recorder.aclose() == 0
    assert sink.messages == [(3, 0), (0, 2), (0, 1)]


@pytest.mark.parametrize("away", [None, ConnectionError("gone")], ids=["slow", "away"])
async def test_a_closing_never_overtakes_its_own_opening(lanes: Lanes, away: Exception | None) -> None:
    recorder, first, second = Recorder(lanes), make_key(), make_key()
    await opened(recorder, first)
    lanes.opens_error = away
    if away is None:
        lanes.opens.clear()
    known = await recorder.open([second], 1.0)
    recorder.close([(first, None, SPAN), (second, None, SPAN)])
    await lanes.has(1, 1)  # that of the first does not wait
    if away:
        await until(lambda: lanes.messages.count((1, 0)) >= 4)
    await settle()
    assert [key for key, _, _ in lanes.closed] == [first]
    assert not known.done()
    lanes.opens_error = None
    lanes.opens.set()
    await lanes.has(2, 2)
    assert known.done()
    assert lanes.messages.count((0, 1)) == 2


async def test_the_closing_of_a_refused_call_is_sent_as_well(sink: Sink) -> None:
    sink.over = {"at-1"}
    recorder, key = Recorder(sink, capacity=1), make_key()
    with pytest.raises(AttemptFinishedError):
        await opened(recorder, key)
    recorder.close([(key, None, SPAN)])
    assert await recorder.aclose() == 0
    assert sink.closed == [(key, None, SPAN)]


async def test_an_outage_is_told_of_once_for_both_kinds(
    sink: Sink, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    first = make_key()
    await opened(recorder, first)
    sink.error = ConnectionError("gone")
    recorder.close([(first, None, None)])
    known = await recorder.open([make_key()], 1.0)
    tries = sink.tries
    await until(lambda: sink.tries >= tries + 6)
    sink.error = None
    await known
    await sink.has(2, 1)
    assert sink.most_at_once <= 2
    messages = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert messages == [
        "the store cannot be reached; 2 announcements and records wait: gone",
        "the store can be reached again",
    ]


async def test_a_call_of_an_attempt_that_is_over_is_refused_and_the_others_are_not(
    sink: Sink, recorder: Recorder
) -> None:
    sink.over = {"at-9"}
    keys = [make_key(), make_key(attempt_id="at-9"), make_key()]
    known = [await recorder.open([key], 1.0) for key in keys]
    await known[0]
    with pytest.raises(
        AttemptFinishedError, match="attempt already finished; its API key has been revoked"
    ) as refused:
        await known[1]
    await known[2]
    assert (refused.value.status, refused.value.kind) == (401, "authentication_error")
    assert recorder.stats.rejected == 1


async def test_a_full_buffer_makes_new_calls_wait_until_there_is_room(sink: Sink) -> None:
    recorder, keys = Recorder(sink, capacity=2), [make_key() for _ in range(3)]
    await opened(recorder, *keys[:2])
    third = asyncio.create_task(recorder.open(keys[2:], 2.0))
    await settle()
    assert not third.done()
    recorder.close([(keys[0], None, None)])
    await (await third)
    assert sink.opened == [(keys[0], 1.0), (keys[1], 1.0), (keys[2], 2.0)]


async def test_a_record_that_is_not_sent_yet_takes_room(sink: Sink) -> None:
    recorder, first, second = Recorder(sink, capacity=1), make_key(), make_key()
    await opened(recorder, first)
    sink.error = ConnectionError("gone")
    recorder.close([(first, make_generation([1], [2], key=first), None)])
    waiting = asyncio.create_task(recorder.open([second], 2.0))
    await settle()
    assert not waiting.done()
    sink.error = None
    await (await waiting)
    assert [key for key, _, _ in sink.closed] == [first]


async def test_who_finds_no_room_in_time_is_turned_away() -> None:
    recorder, key = Recorder(Sink(), capacity=1, timeout_s=0.01), make_key()
    await opened(recorder, key)
    with pytest.raises(OverloadedError, match="send the request again") as away:
        await recorder.open([make_key()], 2.0)
    assert away.value.status == 503
    with pytest.raises(OverloadedError):
        await recorder.open([make_key(), make_key()], 2.0)  # there never is room for two
    recorder.close([(key, None, None)])
    await settle()
    await opened(recorder, make_key())
    assert recorder.stats.overloaded == 3


@pytest.mark.parametrize(
    "error", [StoreLostError("gone"), ConnectionResetError(), OSError("no route"), RuntimeError("?")]
)
async def test_what_could_not_be_sent_is_kept_and_sent_when_the_store_is_back(
    sink: Sink, recorder: Recorder, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    sink.error = error
    keys = [make_key() for _ in range(3)]
    records: list[ClosedCall] = [(key, make_generation([1], [2], key=key), SPAN) for key in keys]
    known = [await recorder.open([key], 1.0) for key in keys]
    recorder.close(records)
    await until(lambda: sink.tries >= 5)
    assert recorder.stats.unsent == 6
    assert not any(future.done() for future in known)
    sink.error = None
    await asyncio.gather(*known)
    await sink.has(3, 3)
    assert (sink.opened, sink.closed) == ([(key, 1.0) for key in keys], records)
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 2, "an outage is logged once, and its end"


async def test_who_waits_too_long_for_the_store_is_turned_away_but_his_record_is_kept(sink: Sink) -> None:
    sink.gate.clear()
    recorder, key = Recorder(sink, timeout_s=0.01), make_key()
    known = await recorder.open([key], 1.0)
    with pytest.raises(OverloadedError, match="the store did not answer within"):
        await known
    recorder.close([(key, make_generation([1], [2], key=key), None)])
    sink.gate.set()
    await sink.has(1, 1)
    assert recorder.stats.overloaded == 1


async def test_a_record_that_cannot_be_stored_holds_up_no_other(caplog: pytest.LogCaptureFixture) -> None:
    bad = make_key()

    class Picky(Sink):
        async def __call__(self, opened: list[OpenedCall], closed: list[ClosedCall]) -> Sequence[CallKey]:
            if any(key == bad and span is not None for key, _, span in closed):
                raise SpanError("not JSON")
            return await super().__call__(opened, closed)

    sink = Picky()
    recorder, keys = Recorder(sink), [make_key(), bad, make_key()]
    await opened(recorder, *keys)
    recorder.close([(key, make_generation([1], [2], key=key), SPAN) for key in keys])
    await sink.has(3, 3)
    assert [(key, span is None) for key, _, span in sink.closed] == [
        (keys[0], False),
        (bad, True),
        (keys[2], False),
    ]
    assert recorder.stats.lost == 0
    assert "not JSON" in caplog.text


async def test_a_record_that_can_be_stored_in_no_way_is_lost_loudly(caplog: pytest.LogCaptureFixture) -> None:
    bad = make_key()

    class Picky(Sink):
        async def __call__(self, opened: list[OpenedCall], closed: list[ClosedCall]) -> Sequence[CallKey]:
            if any(key == bad for key, *_ in [*opened, *closed]):
                raise OverflowError("too large")
            return await super().__call__(opened, closed)

    sink = Picky()
    recorder, good = Recorder(sink, capacity=2), make_key()
    known = [await recorder.open([key], 1.0) for key in (bad, good)]
    with pytest.raises(Exception, match="too large"):
        await known[0]
    await known[1]
    recorder.close([(bad, None, SPAN), (good, None, SPAN)])
    await sink.has(1, 1)
    await opened(recorder, make_key(), make_key())  # there is room again for two
    assert recorder.stats.lost == 2
    assert caplog.text.count("announcement or record as invalid") == 3


async def test_closing_the_recorder_sends_what_there_is(sink: Sink, recorder: Recorder) -> None:
    sink.error = ConnectionError("for a moment")
    key = make_key()
    await recorder.open([key], 1.0)
    recorder.close([(key, None, None)])
    await settle()
    closing = asyncio.create_task(recorder.aclose())
    await settle()
    assert not closing.done()
    sink.error = None
    assert await closing == 0, "both kinds are waited for"
    assert (len(sink.opened), len(sink.closed)) == (1, 1)
    with pytest.raises(OverloadedError):
        await recorder.open([make_key()], 2.0)


async def test_closing_says_how_much_was_lost(
    sink: Sink, recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    sink.error = ConnectionError("for good")
    keys = [make_key(), make_key()]
    known = await recorder.open(keys, 1.0)
    recorder.close([(keys[0], None, None)])
    assert await recorder.aclose(timeout=0.01) == 3
    with pytest.raises(OverloadedError):
        await known
    assert "3 announcements and records of calls are lost" in caplog.text


async def test_closing_ends_those_who_wait_for_room(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(Sink(), capacity=1)
    await opened(recorder, make_key())
    waiting = asyncio.create_task(recorder.open([make_key()], 1.0))
    await settle()
    closing = asyncio.create_task(recorder.aclose(timeout=0.01))
    with pytest.raises(OverloadedError):
        await waiting
    await closing
    assert "1 calls were still open" in caplog.text


async def test_closing_waits_for_the_calls_that_are_open() -> None:
    sink, key = Sink(), make_key()
    recorder = Recorder(sink)
    await opened(recorder, key)
    closing = asyncio.create_task(recorder.aclose(timeout=60))
    await settle()
    assert not closing.done()
    recorder.close([(key, None, None)])
    assert await closing == 0
    assert len(sink.closed) == 1


async def test_aborted_calls_are_counted() -> None:
    recorder, key = Recorder(Sink()), make_key()
    cut = make_generation([1], [2], key=key)
    object.__setattr__(cut, "finish_reason", "aborted")
    await opened(recorder, key)
    recorder.close([(key, cut, None)])
    assert (recorder.stats.closed, recorder.stats.aborted) == (1, 1)


STEPS = st.lists(
    st.sampled_from(
        [
            "open",
            "open two",
            "close",
            "fail",
            "fail to open",
            "fail to close",
            "recover",
            "lose answer",
            "rest",
        ]
    ),
    max_size=40,
)

DOWN: dict[str, set[str]] = {
    "fail": {"open", "close"},
    "fail to open": {"open"},
    "fail to close": {"close"},
    "recover": set(),
}


class Flaky:
    """A store that is idempotent, as the real one is, and loses messages and answers."""

    def __init__(self) -> None:
        self.opened: dict[CallKey, float] = {}
        self.closed: dict[CallKey, bool] = {}
        self.order: list[CallKey] = []
        self.down: set[str] = set()
        self.loses_answers = False
        self.under_way: set[str] = set()

    async def __call__(self, opened: list[OpenedCall], closed: list[ClosedCall]) -> Sequence[CallKey]:
        assert bool(opened) != bool(closed), "each kind has its own messages"
        kind = "open" if opened else "close"
        assert kind not in self.under_way, "one message of a kind at a time"
        self.under_way.add(kind)
        await asyncio.sleep(0)
        self.under_way.remove(kind)
        if kind in self.down:
            raise ConnectionError("down")
        for key, start in opened:
            self.opened.setdefault(key, start)
        for key, _, _ in closed:
            assert key in self.opened, "closed before it was opened"
            if key not in self.closed:
                self.order.append(key)
            self.closed[key] = True
        if self.loses_answers:
            self.loses_answers = False
            raise StoreLostError("the answer was lost")
        return []


@given(STEPS)
def test_nothing_is_lost_doubled_or_disordered_whatever_fails(steps: list[str]) -> None:
    async def run() -> None:
        sink, known = Flaky(), []
        keys: list[CallKey] = []
        closed: list[CallKey] = []
        recorder = Recorder(sink, capacity=1000)
        for step in steps:
            match step:
                case "open" | "open two":
                    new = [make_key() for _ in range(1 if step == "open" else 2)]
                    keys += new
                    known.append(await recorder.open(new, float(len(keys))))
                case "close" if len(closed) < len(keys):
                    key = keys[len(closed)]
                    closed.append(key)
                    recorder.close([(key, None, None)])
                case "fail" | "fail to open" | "fail to close" | "recover":
                    sink.down = DOWN[step]
                case "lose answer":
                    sink.loses_answers = True
                case _:
                    await settle()
        sink.down, sink.loses_answers = set(), False
        for key in keys[len(closed) :]:
            closed.append(key)
            recorder.close([(key, None, None)])
        assert await recorder.aclose() == 0
        assert list(sink.opened) == keys
        assert sink.order == closed
        assert all(future.done() and future.exception() is None for future in known)
        assert recorder.stats.unsent == 0
        assert recorder._used == 0

    asyncio.run(run())


FILE_SIZE = 2**20


async def close_with_images(recorder: Recorder, count: int) -> int:
    """Close calls of a conversation, each with its own copy of one image; return the bytes that are held."""
    tracemalloc.start()
    for _ in range(count):
        key = make_key()
        await opened(recorder, key)
        recorder.close([(key, None, SPAN)], {"0" * 64: bytes(FILE_SIZE)})
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held


async def test_unsent_calls_hold_an_image_once_and_a_stored_one_not_at_all(lanes: Lanes) -> None:
    written: list[Mapping[str, bytes]] = []
    is_away = True

    async def write(images: Mapping[str, bytes]) -> None:
        if is_away:
            raise StoreLostError("away")
        written.append(images)

    recorder = Recorder(lanes, write_images=write)
    assert FILE_SIZE < await close_with_images(recorder, 20) < 2 * FILE_SIZE
    is_away = False
    await lanes.has(20, 20)
    lanes.closes.clear()
    assert await close_with_images(recorder, 20) < FILE_SIZE / 2
    lanes.closes.set()
    await recorder.aclose()
    assert len(written) == 1


async def test_a_lost_record_holds_no_image() -> None:
    async def write(images: Mapping[str, bytes]) -> None:
        raise ValueError("invalid")

    recorder = Recorder(Sink(), write_images=write)
    await close_with_images(recorder, 3)
    await until(lambda: recorder.stats.lost == 3)
    assert recorder._unsent_images == {}
