"""Capture: the store knows a call before its answer leaves; records travel beside the request; the buffer is bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from unit_helpers import FakeEngine, make_generation, make_key, within

from raylight.semconv import AGENT_NAME, CALL_ID, RESPONSE_TOKEN_IDS
from raylight.serving.capture import SCOPE, CallInfo, CapturingEngine, Closed, Opened, Recorder, Scope
from raylight.serving.engine import RequestError, Sampled, SamplingParams
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.types import Attributes, Span

PARAMS = SamplingParams(8, temperature=0.5)


def a_call(call_id: str = "c" * 32) -> CallInfo:
    return CallInfo("a.span", lambda sampled: {"length": len(sampled.output_ids)}, call_id)


class Sink:
    """What the store was told; `gate` makes it slow, `error` makes it fail."""

    def __init__(self) -> None:
        self.opened: list[Opened] = []
        self.closed: list[Closed] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.told = asyncio.Condition()
        self.error: Exception | None = None
        self.at_once = self.most_at_once = 0

    async def __call__(self, opened: list[Opened], closed: list[Closed]) -> None:
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
        sampled = await engine.generate([1, 2, 3], PARAMS, a_call())
        await sink.has(1, 1)
    ((key, generation, span),) = sink.closed
    assert sink.opened == [(key, 10.0)]
    assert key == generation.key
    assert (key.rollout_id, key.attempt_id, key.call_id) == ("ro-1", "at-1", "c" * 32)
    assert generation.prompt_ids == [1, 2, 3]
    assert (generation.output_ids, generation.logprobs, generation.weight_versions) == (
        sampled.output_ids, sampled.logprobs, sampled.weight_versions,
    )  # fmt: skip
    assert (generation.start_time, generation.end_time, generation.temperature) == (10.0, 12.0, 0.5)
    assert (generation.finish_reason, generation.agent, generation.model) == ("stop", None, "policy")
    assert (span.name, span.start_time, span.end_time) == ("a.span", 10.0, 12.0)


async def test_a_call_is_announced_before_its_answer_leaves(scope: Scope) -> None:
    sink = Sink()
    sink.gate.clear()
    SCOPE.set(scope)
    engine = CapturingEngine(FakeEngine(), Recorder(sink))
    async with within():
        answering = asyncio.create_task(engine.generate([1], PARAMS, a_call()))
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
        answering = asyncio.create_task(engine.generate([1], PARAMS, a_call()))
        await sink.has(1, 0)
        assert sink.closed == []
        inner.gate.set()
        await answering
        await sink.has(1, 1)


async def test_outside_an_attempt_nothing_is_recorded() -> None:
    sink = Sink()
    engine = CapturingEngine(FakeEngine("ab"), Recorder(sink))
    assert SCOPE.get() is None
    assert len((await engine.generate([1], PARAMS, a_call())).output_ids) == 2
    await settle()
    assert (sink.opened, sink.closed) == ([], [])


async def test_a_cancelled_call_is_closed_without_a_generation(scope: Scope) -> None:
    sink, inner = Sink(), FakeEngine()
    inner.gate.clear()
    SCOPE.set(scope)
    engine = CapturingEngine(inner, Recorder(sink))
    async with within():
        answering = asyncio.create_task(engine.generate([1], PARAMS, a_call()))
        await inner.called.wait()
        answering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answering
        await sink.has(1, 1)
    assert sink.closed == [(sink.opened[0][0], None, None)]
    assert inner.cancelled == 1


async def test_a_failed_call_is_closed_without_a_generation_and_its_error_passes(scope: Scope) -> None:
    sink, inner = Sink(), FakeEngine()
    inner.error = RequestError("too many", 503)
    SCOPE.set(scope)
    engine = CapturingEngine(inner, Recorder(sink))
    async with within():
        with pytest.raises(RequestError, match="too many"):
            await engine.generate([1], PARAMS, a_call())
        await sink.has(1, 1)
    assert sink.closed[0][1:] == (None, None)


async def test_a_response_that_was_cut_off_is_recorded_as_it_is(scope: Scope) -> None:
    """An engine that stops answers what it has; whether to train on it is not for the capture to say."""

    class Stopping(FakeEngine):
        async def generate(self, prompt_ids: list[int], params: SamplingParams) -> Sampled:
            return Sampled([1], [-0.5], [3])

    sink = Sink()
    SCOPE.set(scope)
    async with within():
        await CapturingEngine(Stopping(), Recorder(sink)).generate([1], PARAMS, a_call())
        await sink.has(1, 1)
    assert (sink.closed[0][1].finish_reason, sink.closed[0][1].output_ids) == ("aborted", [1])


async def test_a_call_whose_span_cannot_be_made_is_closed_all_the_same(scope: Scope) -> None:
    def broken(sampled: Sampled) -> Attributes:
        raise KeyError("attributes")

    sink = Sink()
    SCOPE.set(scope)
    async with within():
        with pytest.raises(KeyError, match="attributes"):
            await CapturingEngine(FakeEngine(), Recorder(sink)).generate([1], PARAMS, CallInfo("s", broken))
        await sink.has(1, 1)
    assert sink.closed[0][2] is None


async def test_the_span_of_a_call_names_its_attempt_agent_and_tokens() -> None:
    sink = Sink()
    SCOPE.set(Scope("ro-1", "at-1", "planner"))
    async with within():
        await CapturingEngine(FakeEngine("ab"), Recorder(sink)).generate([1], PARAMS, a_call("0123456789abcdef" * 2))
        await sink.has(1, 1)
    _, generation, span = sink.closed[0]
    assert generation.agent == "planner"
    assert span.attributes == {"length": 2, CALL_ID: "0123456789abcdef" * 2, AGENT_NAME: "planner"}
    assert (span.rollout_id, span.attempt_id) == ("ro-1", "at-1")
    assert (span.span_id, span.trace_id) == ("0123456789abcdef", "0123456789abcdef" * 2)
    SCOPE.set(None)


async def test_the_store_gives_the_span_back_with_its_tokens() -> None:
    store = StoreClient(StoreService())
    await store.start_rollout("task", rollout_id="ro-1")
    attempt = await store.get_latest_attempt("ro-1")
    assert attempt is not None
    SCOPE.set(Scope("ro-1", attempt.attempt_id))
    engine = CapturingEngine(FakeEngine("ab"), Recorder(store.capture))
    async with within():
        for number in range(3):
            await engine.generate([1, 2], PARAMS, a_call(f"{number}" * 32))
        await store.finish_attempt(await store.get_rollout_by_id("ro-1"), "succeeded")
    spans = await store.query_spans("ro-1")
    assert [span.attributes[RESPONSE_TOKEN_IDS] for span in spans] == [[97, 98]] * 3
    (found,) = await store.collect(["ro-1"])
    assert [call.key.call_id[0] for call in found.generations] == ["0", "1", "2"]
    assert (await store.statistics())["generations"] == 3
    SCOPE.set(None)


async def test_a_store_that_fails_is_an_error_of_the_waiting_call_and_not_of_the_next(scope: Scope) -> None:
    sink = Sink()
    sink.error = ConnectionError("the store is gone")
    SCOPE.set(scope)
    engine = CapturingEngine(FakeEngine(), Recorder(sink))
    async with within():
        with pytest.raises(ConnectionError, match="the store is gone"):
            await engine.generate([1], PARAMS, a_call())
        sink.error = None
        await engine.generate([1], PARAMS, a_call())
        assert len(sink.opened) == 1


async def test_a_full_buffer_makes_new_calls_wait_until_there_is_room() -> None:
    sink = Sink()
    recorder = Recorder(sink, capacity=2)
    async with within():
        keys = [make_key() for _ in range(3)]
        for key in keys[:2]:
            await (await recorder.open(key, 1.0))
        third = asyncio.create_task(recorder.open(keys[2], 2.0))
        await settle()
        assert not third.done()
        recorder.close(keys[0], None, None)
        await (await third)
        assert sink.opened == [(keys[0], 1.0), (keys[1], 1.0), (keys[2], 2.0)]


async def test_a_full_buffer_has_room_again_when_the_store_did_not_take_a_record() -> None:
    sink = Sink()
    recorder = Recorder(sink, capacity=1)
    async with within():
        first, second = make_key(), make_key()
        await (await recorder.open(first, 1.0))
        sink.error = ConnectionError("gone")
        recorder.close(first, None, None)
        await settle()
        sink.error = None
        await (await recorder.open(second, 2.0))
        assert sink.opened == [(first, 1.0), (second, 2.0)]


async def test_records_are_sent_in_order_in_batches_one_at_a_time() -> None:
    sink = Sink()
    recorder = Recorder(sink)
    keys = [make_key() for _ in range(20)]
    async with within():
        known = [await recorder.open(key, float(start)) for start, key in enumerate(keys)]
        for key in keys:
            recorder.close(key, make_generation([1], [2], key=key), Span.from_attributes(name="s", attributes={}))
        await asyncio.gather(*known)
        await sink.has(20, 20)
    assert sink.opened == [(key, float(start)) for start, key in enumerate(keys)]
    assert [key for key, _, _ in sink.closed] == keys
    assert sink.most_at_once == 1


async def test_closing_a_call_never_waits_for_the_store() -> None:
    sink = Sink()
    recorder = Recorder(sink)
    async with within():
        key = make_key()
        await (await recorder.open(key, 1.0))
        sink.gate.clear()
        recorder.close(key, None, None)  # not even awaitable
        await settle()
        assert sink.closed == []
        sink.gate.set()
        await sink.has(1, 1)
