"""Holds: an attempt whose calls are answered before the store has them cannot succeed without them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
from capture_helpers import Sink, settle
from hypothesis import example, given
from hypothesis import strategies as st
from unit_helpers import make_generation, make_key, until

from raylight.serving.capture import recorder as holds_module
from raylight.serving.capture import recorder as module
from raylight.serving.capture.recorder import AttemptFinishedError, ClosedCall, Holds, OpenedCall, Recorder
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.store.tables.transitions import HOLD
from raylight.types import REPEATED, AttemptedRollout, CallKey

pytestmark = pytest.mark.timeout(60)
FIRST, SECOND = "replica-1", "replica-2"


def test_a_hold_covers_calls_once_it_is_stored_and_until_its_release() -> None:
    now = 0.0
    holds = Holds(1.0, lambda: now)
    key = make_key()
    hold = holds.request(key)
    assert hold.key.call_id.startswith(HOLD)
    assert (holds.request(key), holds.use(key.attempt_id)) == (None, None)
    now = 2.0
    assert (holds.release(), holds.next_release) == ([], None)
    hold.is_stored = True
    assert holds.use(key.attempt_id) is hold
    now = 2.9
    assert (holds.release(), holds.next_release) == ([], 3.0)
    now = 3.0
    assert holds.release() == [hold]
    assert holds.use(key.attempt_id) is None
    assert holds.request(key) is not hold


def test_holds_are_released_in_the_order_of_their_last_use() -> None:
    now = 0.0
    holds = Holds(1.0, lambda: now)
    keys = [make_key(attempt_id=f"at-{i}") for i in range(3)]
    made = [holds.request(key) for key in keys]
    for hold in made:
        hold.is_stored = True
    now = 0.5
    holds.use("at-0")
    now = 1.0
    assert holds.release() == made[1:]
    assert holds.release(everything=True) == made[:1]


def test_an_attempt_is_held_after_a_few_quick_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(holds_module, "QUICK_CALLS", 3)
    now = 0.0
    holds = Holds(1.0, lambda: now)
    key = make_key()
    for seconds in (0.0, 0.01, 1.0, 0.01):
        now += seconds
        assert holds.request(key) is None
        now += 0.5
        holds.use(key.attempt_id)
    now += 0.01
    assert holds.request(key) is not None


def test_without_a_time_nothing_is_held() -> None:
    assert Holds(0, lambda: 0.0).request(make_key()) is None


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LINGER_S", "COVERED_LINGER_S", "INTERVAL_S"):
        monkeypatch.setattr(module, name, 0.0)
    monkeypatch.setattr(holds_module, "QUICK_CALLS", 1)


async def held(recorder: Recorder) -> CallKey:
    """Make a call that holds its attempt."""
    recorder._waits = True
    key = make_key()
    await (await recorder.open([key], 1.0))
    recorder.close([(key, None, None)])
    return key


async def test_a_call_whose_answer_waited_makes_the_next_one_a_hold() -> None:
    sink = Sink()
    sink.gate.clear()
    recorder, key = Recorder(sink), make_key()
    known = await recorder.open([key], 1.0)
    await settle()
    sink.gate.set()
    await known
    recorder.close([(key, None, None)])
    assert recorder._waits
    await held(recorder)
    assert [key.call_id.startswith(HOLD) for key, _ in sink.opened] == [False, False, True]
    await recorder.aclose()


async def test_a_held_attempt_is_answered_while_the_store_is_away_and_nothing_is_lost() -> None:
    sink = Sink()
    recorder = Recorder(sink)
    await held(recorder)
    sink.gate.clear()
    keys = [make_key() for _ in range(5)]
    for key in keys:
        assert (await recorder.open([key], 2.0)).done()
        recorder.close([(key, None, None)])
    sink.gate.set()
    assert await recorder.aclose() == 0
    assert [key for key, _ in sink.opened[2:]] == keys
    released = [key.call_id for key, _, _ in sink.closed if key.call_id.startswith(HOLD)]
    assert released == [sink.opened[1][0].call_id]
    assert sink.closed[-1][0].call_id == released[0]


async def test_a_call_with_a_budget_is_announced_first() -> None:
    sink = Sink()
    recorder = Recorder(sink)
    await held(recorder)
    sink.gate.clear()
    key = make_key()
    known = await recorder.open([key], 2.0, may_cover=False)
    await settle()
    assert not known.done()
    sink.gate.set()
    await known
    recorder.close([(key, None, None)])
    assert await recorder.aclose() == 0


async def test_the_end_of_an_attempt_is_noticed_with_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLD_S", 100.0)
    sink = Sink()
    recorder = Recorder(sink)
    first = await held(recorder)
    sink.over = {first.attempt_id}
    key = make_key()
    await (await recorder.open([key], 2.0))
    await until(lambda: recorder.stats.rejected == 1)
    after = make_key()
    with pytest.raises(AttemptFinishedError):
        await (await recorder.open([after], 3.0))
    recorder.close([(key, None, None), (after, None, None)])
    assert await recorder.aclose() == 0
    assert not any(key.call_id.startswith(HOLD) for key, _, _ in sink.closed), "it may cover lost calls"


async def test_a_hold_is_released_soon_after_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLD_S", 0.001)
    monkeypatch.setattr(module, "COVERED_LINGER_S", 60.0)
    sink = Sink()
    recorder = Recorder(sink)
    await held(recorder)
    await sink.has(2, 2)
    await recorder.aclose()


class Wire:
    """The way of a replica's messages to the store: each is delivered when it may be."""

    def __init__(self, store: StoreClient, name: str) -> None:
        self._store = store
        self._name = name
        self.may_pass = asyncio.Semaphore(0)
        self.loses_answer = False

    async def __call__(self, opened: list[OpenedCall], closed: list[ClosedCall]) -> Sequence[CallKey]:
        await self.may_pass.acquire()
        rejected = await self._store.capture(opened, closed, self._name)
        if self.loses_answer:
            self.loses_answer = False
            raise ConnectionError("the answer was lost")
        return rejected


class Replica:
    """A recorder and the calls of one attempt through it."""

    def __init__(self, store: StoreClient, rollout: AttemptedRollout, name: str) -> None:
        self.wire = Wire(store, name)
        self.recorder = Recorder(self.wire)
        self.now = 0.0
        self.recorder._holds._clock = lambda: self.now
        self._ids = rollout.rollout_id, rollout.attempt.attempt_id
        self.calls: list[tuple[CallKey, asyncio.Future[None]]] = []
        self._closed = 0

    async def call(self, request: str) -> None:
        """Send a request, which may equal an earlier one."""
        self.recorder._waits = True
        key = CallKey(*self._ids, make_key().call_id, request)
        self.calls.append((key, await self.recorder.open([key], 1.0)))

    def close(self) -> None:
        """End the oldest open call that was answered."""
        if self._closed < len(self.calls) and self.calls[self._closed][1].done():
            key, known = self.calls[self._closed]
            sampled = make_generation([1], [2], key=key) if known.exception() is None else None
            self.recorder.close([(key, sampled, None)])
            self._closed += 1

    def answered(self) -> set[str]:
        """Return the calls whose answers may have left."""
        return {key.call_id for key, known in self.calls if known.done() and known.exception() is None}

    def unanswered(self) -> list[str]:
        """Return the requests without an answer, which a client may send again."""
        return [key.request for key, known in self.calls if not known.done()]

    async def kill(self) -> None:
        await self.recorder._records.stop()
        await self.recorder._announcements.stop()
        if self.recorder._releasing is not None:
            self.recorder._releasing.cancel()

    async def end(self) -> None:
        """End in order, with a store that can be reached."""
        for _ in range(200):
            self.wire.may_pass.release()
        await settle()
        await until(lambda: all(known.done() for _, known in self.calls))
        while self._closed < len(self.calls):
            self.close()
        assert await self.recorder.aclose() == 0


@asynccontextmanager
async def running() -> AsyncIterator[tuple[StoreClient, AttemptedRollout]]:
    service = StoreService()
    store = StoreClient(service)
    try:
        yield store, await store.start_rollout("task")
    finally:
        await service.close()


STEPS = st.lists(
    st.sampled_from(
        ["call", "call", "close", "close", "pass", "pass", "lose answer", "time", "kill", "again", "lost"]
    ),
    max_size=30,
)


@given(STEPS, st.booleans())
@example(["call", "pass", "pass", "time", "call", "kill", "call"], True).via(
    "an equal request, no repetition"
)
def test_no_attempt_succeeds_without_a_call_that_was_answered(steps: list[str], ends: bool) -> None:
    """Replicas die between any two messages, also before the store has what they answered."""

    async def run(monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("LINGER_S", "COVERED_LINGER_S", "INTERVAL_S"):
            monkeypatch.setattr(module, name, 0.0)
        monkeypatch.setattr(holds_module, "QUICK_CALLS", 1)
        monkeypatch.setattr(module, "HOLD_S", 100.0)
        async with running() as (store, rollout):
            replicas = [Replica(store, rollout, FIRST)]
            is_lost, killed = False, False
            unanswered: list[str] = []
            for number, step in enumerate(steps):
                replica = replicas[-1]
                match step:
                    case "call":
                        await replica.call(f"request {number % 3}")
                    case "close":
                        replica.close()
                    case "pass":
                        replica.wire.may_pass.release()
                    case "lose answer":
                        replica.wire.loses_answer = True
                    case "time":
                        replica.now += 1000.0
                        replica.recorder._release_holds()
                    case "kill" if not killed:
                        killed = True
                        await replica.kill()
                        replicas.append(Replica(store, rollout, SECOND))
                        unanswered = replica.unanswered()
                    case "again" if unanswered:
                        await replica.call(unanswered.pop() + REPEATED)
                    case "lost" if not is_lost:  # also of a replica that only seemed to be dead
                        is_lost = True
                        await store.lose_recorder(FIRST)
                await settle()
            answered = {call_id for replica in replicas for call_id in replica.answered()}
            if ends:
                await replicas[-1].end()
                answered |= replicas[-1].answered()
            if killed and not is_lost:
                await store.lose_recorder(FIRST)
            decided = await store.finish_attempt(rollout, "succeeded", timeout=0)
            (found,) = await store.collect([rollout.rollout_id])
            stored = {call.key.call_id for call in found.generations}
            if decided.status == "succeeded":
                assert answered <= stored
            if ends and not killed and not is_lost:
                assert decided.status == "succeeded"
            if not ends and not killed:
                await replicas[-1].kill()

    with pytest.MonkeyPatch.context() as monkeypatch:
        asyncio.run(run(monkeypatch))
