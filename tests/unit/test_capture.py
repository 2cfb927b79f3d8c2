"""Capture: the store knows a call before its answer leaves; records travel beside the request; the buffer is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from unit_helpers import FakeEngine, make_generation, make_key, within

from raylight.serving.capture import SCOPE, CapturingEngine, Closed, Recorder, Scope
from raylight.serving.engine import RequestError, SamplingParams
from raylight.types import CallKey

PARAMS = SamplingParams(8, temperature=0.5)


class Sink:
    """What the store was told; `gate` makes it slow, `error` makes it fail."""

    def __init__(self) -> None:
        self.opened: list[CallKey] = []
        self.closed: list[Closed] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.told = asyncio.Condition()
        self.error: Exception | None = None
        self.at_once = self.most_at_once = 0

    async def __call__(self, opened: list[CallKey], closed: list[Closed]) -> None:
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.gate.wait()
            if self.error:
                raise self.error
            async with self.told:
                self.opened += opened
                self.closed += closed
                self.told.notify_all()
        finally:
            self.at_once -= 1

    async def has(self, opened: int, closed: int) -> None:
        async with self.told:
            await self.told.wait_for(lambda: (len(self.opened), len(self.closed)) >= (opened, closed))


@pytest.fixture
def scope() -> Iterator[Scope]:
    token = SCOPE.set(Scope("ro-1", "at-1"))
    yield Scope("ro-1", "at-1")
    SCOPE.reset(token)


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_call_is_recorded_token_for_token(scope: Scope) -> None:
    sink, times = Sink(), iter([10.0, 12.0])
    engine = CapturingEngine(FakeEngine("ab"), Recorder(sink), clock=lambda: next(times))
    SCOPE.set(scope)
    async with within():
        sampled = await engine.generate([1, 2, 3], PARAMS)
        await sink.has(1, 1)
    ((key, generation),) = sink.closed
    assert sink.opened == [key] == [generation.key]
    assert (key.rollout_id, key.attempt_id) == ("ro-1", "at-1")
    assert generation.prompt_ids == [1, 2, 3]
    assert (generation.output_ids, generation.logprobs, generation.weight_versions) == (
        sampled.output_ids, sampled.logprobs, sampled.weight_versions,
    )  # fmt: skip
    assert (generation.start_time, generation.end_time, generation.temperature) == (10.0, 12.0, 0.5)


async def test_a_call_is_announced_before_its_answer_leaves(scope: Scope) -> None:
    sink = Sink()
    sink.gate.clear()
    SCOPE.set(scope)
    engine = CapturingEngine(FakeEngine(), Recorder(sink))
    async with within():
        answering = asyncio.create_task(engine.generate([1], PARAMS))
        await settle()
        assert not answering.done()  # sampled, but the store does not know of it yet
        assert len(engine.inner.calls) == 1
        sink.gate.set()
        await answering
        assert len(sink.opened) == 1


async def test_a_call_is_announced_while_it_is_still_sampled(scope: Scope) -> None:
    sink, inner = Sink(), FakeEngine()
    inner.gate.clear()
    SCOPE.set(scope)
    engine = CapturingEngine(inner, Recorder(sink))
    async with within():
        answering = asyncio.create_task(engine.generate([1], PARAMS))
        await sink.has(1, 0)
        assert sink.closed == []
        inner.gate.set()
        await answering
        await sink.has(1, 1)


async def test_outside_an_attempt_nothing_is_recorded() -> None:
    sink = Sink()
    engine = CapturingEngine(FakeEngine("ab"), Recorder(sink))
    assert SCOPE.get() is None
    assert len((await engine.generate([1], PARAMS)).output_ids) == 2
    await settle()
    assert (sink.opened, sink.closed) == ([], [])


async def test_a_cancelled_call_is_closed_without_a_generation(scope: Scope) -> None:
    sink, inner = Sink(), FakeEngine()
    inner.gate.clear()
    SCOPE.set(scope)
    engine = CapturingEngine(inner, Recorder(sink))
    async with within():
        answering = asyncio.create_task(engine.generate([1], PARAMS))
        await inner.called.wait()
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        await sink.has(1, 1)
    assert sink.closed == [(sink.opened[0], None)]
    assert inner.cancelled == 1


async def test_a_failed_call_is_closed_without_a_generation_and_its_error_passes(scope: Scope) -> None:
    sink, inner = Sink(), FakeEngine()
    inner.error = RequestError("too many", 503)
    SCOPE.set(scope)
    engine = CapturingEngine(inner, Recorder(sink))
    async with within():
        with pytest.raises(RequestError, match="too many"):
            await engine.generate([1], PARAMS)
        await sink.has(1, 1)
    assert sink.closed[0][1] is None


async def test_a_store_that_fails_is_an_error_of_the_waiting_call_and_not_of_the_next(scope: Scope) -> None:
    sink = Sink()
    sink.error = ConnectionError("the store is gone")
    SCOPE.set(scope)
    engine = CapturingEngine(FakeEngine(), Recorder(sink))
    async with within():
        with pytest.raises(ConnectionError, match="the store is gone"):
            await engine.generate([1], PARAMS)
        sink.error = None
        await engine.generate([1], PARAMS)
        assert len(sink.opened) == 1


async def test_a_full_buffer_makes_new_calls_wait_until_there_is_room() -> None:
    sink = Sink()
    recorder = Recorder(sink, capacity=2)
    async with within():
        keys = [make_key() for _ in range(3)]
        for key in keys[:2]:
            await (await recorder.open(key))
        third = asyncio.create_task(recorder.open(keys[2]))
        await settle()
        assert not third.done()
        recorder.close(keys[0], None)
        await (await third)
        assert sink.opened == keys


async def test_a_full_buffer_has_room_again_when_the_store_did_not_take_a_record() -> None:
    sink = Sink()
    recorder = Recorder(sink, capacity=1)
    async with within():
        first, second = make_key(), make_key()
        await (await recorder.open(first))
        sink.error = ConnectionError("gone")
        recorder.close(first, None)
        await settle()
        sink.error = None
        await (await recorder.open(second))
        assert sink.opened == [first, second]


async def test_records_are_sent_in_order_in_batches_one_at_a_time() -> None:
    sink = Sink()
    recorder = Recorder(sink)
    keys = [make_key() for _ in range(20)]
    async with within():
        known = [await recorder.open(key) for key in keys]
        for key in keys:
            recorder.close(key, make_generation([1], [2], key=key))
        await asyncio.gather(*known)
        await sink.has(20, 20)
    assert sink.opened == keys
    assert [key for key, _ in sink.closed] == keys
    assert sink.most_at_once == 1


async def test_closing_a_call_never_waits_for_the_store() -> None:
    sink = Sink()
    recorder = Recorder(sink)
    async with within():
        key = make_key()
        await (await recorder.open(key))
        sink.gate.clear()
        recorder.close(key, None)  # not even awaitable
        await settle()
        assert sink.closed == []
        sink.gate.set()
        await sink.has(1, 1)
