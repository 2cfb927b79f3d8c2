"""Spans that a runner sends to the store: each to its own attempt, all of them before the attempt is
decided."""

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import psutil
import pytest
import unit_helpers
from opentelemetry import trace as otel
from unit_helpers import enqueue, make_key, run_all, serving, until, wait_and_read

from raylight.agent.emit import emit_message, emit_reward
from raylight.agent.hooks import Hook
from raylight.agent.operations import operation
from raylight.errors import SandboxUnavailableError
from raylight.runner import runner as module
from raylight.semconv import reward_attributes
from raylight.store.client import StoreClient
from raylight.traces.context import AttemptTrace, current_trace
from raylight.traces.reward_spans import find_final_reward
from raylight.traces.tracer import OtelTracer
from raylight.types import TRAINABLE_AGENTS, EnqueueRolloutRequest, Rollout, RolloutState, Span


@pytest.fixture
def tracer(no_provider: None) -> Iterator[OtelTracer]:
    made = OtelTracer()
    yield made
    made.teardown()


def sdk() -> otel.Tracer:
    return otel.get_tracer("agent")


class Watching(StoreClient):
    """Notes the sizes of the batches of spans; `stored` is set after each."""

    def __init__(self, store: StoreClient) -> None:
        super().__init__(store._channel.target)
        self.batches: list[int] = []
        self.stored = asyncio.Event()

    async def add_many_spans(self, spans: Any) -> list[Span]:
        self.batches.append(len(spans))
        stored = await super().add_many_spans(spans)
        self.stored.set()
        return stored


def says(*words: str, reward: float | None = None) -> Callable[[Any], Awaitable[float | None]]:
    """Return an agent that emits messages, and returns a reward."""

    async def agent(task: Any) -> float | None:
        for word in words:
            emit_message(word)
        return reward

    return agent


# no mixing


async def says_asynchronously(task: int) -> float:
    for step in range(3):
        with sdk().start_as_current_span(f"{task}"), operation(name=f"{task}"):
            emit_message(f"{task}")
            await asyncio.gather(step_of(task), step_of(task))
        await asyncio.sleep(0.001 * (step % 2))
    return float(task)


async def step_of(task: int) -> None:
    await asyncio.sleep(0)
    emit_message(f"{task}")


def says_in_a_thread(task: int) -> float:
    for _ in range(3):
        with sdk().start_as_current_span(f"{task}"), operation(name=f"{task}"):
            for _ in range(3):
                emit_message(f"{task}")
    return float(task)


@pytest.mark.parametrize("agent", [says_asynchronously, says_in_a_thread])
async def test_many_rollouts_at_once_never_mix_their_spans(
    store: StoreClient, tracer: OtelTracer, agent: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.002)
    count = 60
    decided = await run_all(store, range(count), agent, {"tracer": tracer, "max_concurrent": 32})
    assert {rollout.status for rollout in decided} == {"succeeded"}
    for rollout in decided:
        spans = await store.query_spans(rollout.rollout_id)
        mine = str(rollout.input)
        assert len(spans) == 3 * 5 + 1
        assert {span.attempt_id for span in spans} == {rollout.attempt.attempt_id}
        said = {span.attributes.get("agentlightning.message.body") for span in spans} - {None}
        assert said == {mine}
        named = {span.attributes.get("agentlightning.operation.name") for span in spans} - {None}
        assert named == {mine}
        assert [span.sequence_id for span in spans] == list(range(1, len(spans) + 1))
        assert find_final_reward(spans) == rollout.input
    counts = await store.statistics()
    assert counts["total_spans"] == count * 16
    assert "spans_duplicate" not in counts


async def test_a_task_of_an_attempt_that_outlives_it_changes_nothing_of_the_next(store: StoreClient) -> None:
    leave = asyncio.Event()
    left_over: list[asyncio.Task[None]] = []

    async def later() -> None:
        await leave.wait()
        emit_reward(99.0)

    async def agent(task: int) -> float:
        if task == 0:
            left_over.append(asyncio.create_task(later()))
        else:
            leave.set()
            await left_over[0]
        return float(task)

    decided = await run_all(store, [0, 1], agent, {"max_concurrent": 1})
    found = await store.collect([rollout.rollout_id for rollout in decided], with_spans=True)
    assert [(item.reward, len(item.spans)) for item in found] == [(0.0, 1), (1.0, 1)]


# in batches, while the attempt runs


async def test_spans_are_in_the_store_while_the_attempt_goes_on(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.01)
    watching = Watching(store)
    go_on, checked = watching.stored, asyncio.Event()

    async def agent(task: int) -> None:
        for word in ("one", "two", "three"):
            emit_message(word)
        await checked.wait()
        go_on.clear()
        emit_message("four")
        await go_on.wait()
        emit_message("five")

    (rollout_id,) = await enqueue(store, [1])
    async with serving(watching, agent):
        await go_on.wait()
        assert (await store.get_rollout_by_id(rollout_id)).status == "running"
        assert len(await store.query_spans(rollout_id)) == 3
        checked.set()
        await store.wait_until_decided(rollout_ids=[rollout_id])
    assert watching.batches == [3, 1]  # the last one travels with the decision
    spans = await store.query_spans(rollout_id)
    said = [span.attributes["agentlightning.message.body"] for span in spans]
    assert said == ["one", "two", "three", "four", "five"]


async def test_an_agent_never_waits_for_the_store(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FLUSH_S", 0.001)
    asked, gate, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    class Slow(StoreClient):
        async def add_many_spans(self, spans: Any) -> list[Span]:
            asked.set()
            await gate.wait()
            return await super().add_many_spans(spans)

    async def agent(task: int) -> None:
        emit_message("first")
        await asked.wait()
        for _ in range(100):
            emit_message("more")
        done.set()

    (rollout_id,) = await enqueue(store, [1])
    async with serving(Slow(store._channel.target), agent):
        await done.wait()  # while the store has not answered
        gate.set()
        await store.wait_until_decided(rollout_ids=[rollout_id])
        await until(lambda: asked.is_set())
    assert (await store.statistics())["total_spans"] == 101


async def test_everything_is_in_the_store_when_the_rollout_is_decided(store: StoreClient) -> None:
    class Judge(Hook):
        def on_rollout_end(self, *, spans: Any) -> None:  # type: ignore[override]
            emit_reward(0.75)

    ids = await enqueue(store, range(10))
    async with serving(store, says(*["x"] * 200, reward=0.5), hooks=[Judge()]):
        for number in range(1, 11):
            for rollout in await wait_and_read(store, ids, at_least=number):
                (found,) = await store.collect([rollout.rollout_id], with_spans=True)
                assert (rollout.status, found.reward, len(found.spans)) == ("succeeded", 0.75, 202)


async def test_a_late_span_of_a_thread_is_counted_and_never_half_there(store: StoreClient) -> None:
    """A thread that runs on after its timeout: each of its spans is in the store, or counted as dropped."""
    leave, stop, emitted = threading.Event(), threading.Event(), []

    def agent(task: int) -> None:
        while not stop.is_set():
            emit_message("on and on")
            emitted.append(1)
            leave.wait(0.0001)
        trace = current_trace()
        assert trace is not None
        emitted.append(trace)  # type: ignore[arg-type]

    (rollout_id,) = await enqueue(store, [1], timeout_seconds=0.1)
    try:
        async with serving(store, agent, max_rollouts=1) as task:
            assert await task == "max_rollouts"  # the store's own clock may have decided the rollout before
    finally:
        stop.set()
    await until(lambda: bool(emitted) and isinstance(emitted[-1], AttemptTrace))
    trace = emitted.pop()
    assert len(await store.query_spans(rollout_id)) + trace.dropped == len(emitted)


async def test_spans_beyond_the_capacity_are_counted_in_the_attempts_metadata(
    store: StoreClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raylight.traces.context.AttemptTrace.__init__.__defaults__", (10, 10))

    async def agent(task: int) -> float:
        for _ in range(15):
            emit_message("x")
        emit_reward(0.25)
        return 0.5

    (decided,) = await run_all(store, [1], agent)
    assert (decided.status, decided.attempt.metadata) == ("succeeded", {"spans_dropped": 5})
    (found,) = await store.collect([decided.rollout_id], with_spans=True)
    assert (found.reward, len(found.spans)) == (0.5, 12)
    assert (await store.statistics())["spans_dropped"] == 5


async def record_nan(task: int) -> None:
    attributes = reward_attributes({"primary": math.nan})
    with sdk().start_as_current_span("agentlightning.annotation", attributes=attributes):
        pass


async def emit_too_many(task: int) -> float:
    for _ in range(11):
        emit_reward(0.5)
    return 0.5


async def emit_unstorable(task: int) -> None:
    trace = current_trace()
    trace.add(Span.from_attributes(name="bad", attributes=reward_attributes({"primary": 1.0}) | {"x": {1}}))


@pytest.mark.parametrize(
    ("agent", "reason", "lost"),
    [
        (record_nan, "must be a finite float", 1),
        (emit_too_many, "and 1 more", 2),
        (emit_unstorable, "cannot be stored", 1),
    ],
)
async def test_a_lost_reward_is_a_failure(
    store: StoreClient,
    tracer: OtelTracer,
    agent: Any,
    reason: str,
    lost: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("raylight.traces.context.AttemptTrace.__init__.__defaults__", (10, 10))
    (decided,) = await run_all(store, [1], agent, {"tracer": tracer})
    assert decided.status == "failed"
    assert decided.attempt.failure.kind == "reward"
    assert decided.attempt.failure.error.startswith("RewardError: a reward was recorded, but could not be")
    assert reason in decided.attempt.failure.error
    assert decided.attempt.metadata["rewards_lost"] == lost
    assert (await store.statistics())["rewards_lost"] == lost


async def test_an_agent_may_return_many_spans(store: StoreClient) -> None:
    async def agent(task: int) -> list[Span]:
        spans = [Span.from_attributes(name="s", attributes={})] * task
        return [*spans, Span.from_attributes(name="r", attributes=reward_attributes({"primary": 0.5}))]

    few, many = await run_all(store, [1500, 200_000], agent)
    assert (few.status, many.status) == ("succeeded", "failed")
    assert "SpanError: the agent returned 200001 spans" in many.attempt.failure.error


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_rollout_with_150_000_spans(store: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unit_helpers, "within", lambda *_: asyncio.timeout(250))
    before = psutil.Process().memory_info().rss

    def agent(task: int) -> float:
        for number in range(150_000):
            emit_message(f"message {number}")
        return 0.5

    (decided,) = await run_all(store, [1], agent)
    (found,) = await store.collect([decided.rollout_id])
    assert (decided.status, found.reward) == ("succeeded", 0.5)
    assert decided.attempt.metadata == {"spans_dropped": 50_000}
    assert psutil.Process().memory_info().rss - before < 1.5e9


async def test_many_spans_are_sent_in_parts(store: StoreClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SEND_BATCH", 10)
    watching = Watching(store)
    (decided,) = await run_all(watching, [1], says(*["x"] * 34, reward=0.5))
    (found,) = await store.collect([decided.rollout_id], with_spans=True)
    assert (found.reward, len(found.spans), watching.batches) == (0.5, 35, [10, 10, 10])


@pytest.mark.parametrize("flush_s", [0.005, 60.0], ids=["while it runs", "at the end"])
async def test_a_span_that_cannot_be_stored_costs_no_other_and_is_told(
    store: StoreClient, flush_s: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FLUSH_S", flush_s)
    watching = Watching(store)

    async def agent(task: int) -> float:
        if task:
            emit_message("good")
            trace = current_trace()
            trace.add(Span.from_attributes(name="bad one", attributes={"what": object()}))
            if flush_s < 1:
                await watching.stored.wait()
        return 0.5

    with caplog.at_level(logging.WARNING, "raylight"):
        other, decided = await run_all(watching, [0, 1], agent)
    assert {other.status, decided.status} == {"succeeded"}
    assert decided.attempt.metadata == {"spans_dropped": 1}
    assert any("bad one" in message and decided.rollout_id in message for message in caplog.messages)
    (found,) = await store.collect([decided.rollout_id], with_spans=True)
    assert (found.reward, len(found.spans)) == (0.5, 2)


async def test_a_rollout_succeeds_after_its_calls_are_recorded(store: StoreClient) -> None:
    returned = asyncio.Event()
    keys = []

    async def agent(task: int, rollout: Rollout) -> float:
        key = make_key(rollout.rollout_id, rollout.attempt.attempt_id)
        await store.capture([(key, 1.0)], [])
        keys.append(key)
        returned.set()
        return 0.5

    (rollout_id,) = await enqueue(store, [1])
    async with serving(store, agent):
        await returned.wait()
        assert await store.wait_until_decided(rollout_ids=[rollout_id], timeout=0.05) == []
        await store.capture([], [(keys[0], None, None)])
        (decided,) = await wait_and_read(store, [rollout_id])
    assert decided.status == "succeeded"


# notes


async def test_marks_and_other_notes_are_in_the_store_when_the_rollout_is_decided(store: StoreClient) -> None:
    class Noting(Hook):
        def on_rollout_end(self, *, rollout: Rollout) -> None:  # type: ignore[override]
            rollout.metadata["by the hook"] = True

    async def agent(task: int, rollout: Rollout) -> float:
        rollout.mark_agent_as_trainable("planner")
        rollout.mark_agent_as_trainable("planner")
        rollout.metadata["steps"] = [1, {"two": 2}]
        return 1.0

    ids = await enqueue(store, [1])
    async with serving(store, agent, hooks=[Noting()]):
        (decided,) = await wait_and_read(store, ids)
        noted = {"steps": [1, {"two": 2}], "by the hook": True}
        assert decided.metadata == {TRAINABLE_AGENTS: ["planner"]} | noted
    (found,) = await store.collect(ids)
    assert found.rollout.metadata == decided.metadata


async def test_notes_of_a_failure_are_kept_too(store: StoreClient) -> None:
    def agent(task: int, rollout: Rollout) -> None:
        rollout.mark_agent_as_trainable("planner")
        raise ValueError("no")

    (decided,) = await run_all(store, [1], agent)
    assert (decided.status, decided.metadata) == ("failed", {TRAINABLE_AGENTS: ["planner"]})


async def test_metadata_of_an_attempt_that_times_out_is_there_when_it_is_decided(store: StoreClient) -> None:
    async def agent(task: int, rollout: Rollout) -> None:
        rollout.mark_agent_as_trainable("planner")
        await asyncio.Event().wait()

    found = await run_all(store, range(8), agent, timeout_seconds=0.2)
    assert [rollout.attempt.status for rollout in found] == ["timeout"] * 8
    assert [rollout.metadata for rollout in found] == [{TRAINABLE_AGENTS: ["planner"]}] * 8


async def test_a_further_attempt_begins_without_the_notes_of_the_one_before(store: StoreClient) -> None:
    def agent(task: int, rollout: Rollout) -> Rollout:
        assert rollout.attempt is not None
        rollout.mark_agent_as_trainable(f"side {rollout.attempt.sequence_id}")
        if rollout.attempt.sequence_id == 1:
            rollout.metadata["reward"] = 0.5
            raise SandboxUnavailableError("the node of the sandbox is gone")
        return rollout

    ids = [(await store.enqueue_rollout(1, metadata={"given": True})).rollout_id]
    async with serving(store, agent):
        (decided,) = await wait_and_read(store, ids)
    assert (decided.status, decided.metadata) == (
        "succeeded",
        {"given": True, TRAINABLE_AGENTS: ["side 2"]},
    )
    assert [found.reward for found in await store.collect(ids)] == [None]


async def test_metadata_that_an_agent_assigns_leaves_the_keys_of_the_run(store: StoreClient) -> None:
    keys = {"draw": {"task": 3}, "greedy": True, "opponent": 2, "source": "math"}

    def agent(task: str, rollout: Rollout) -> Rollout:
        if task == "in place":
            rollout.metadata["draw"]["task"] = 4
            rollout.metadata.clear()
        rollout.metadata = {"reward": 0.5, "source": "mine"}
        return rollout

    requests = [
        EnqueueRolloutRequest(input=task, metadata=keys | {"note": 1}) for task in ("in place", "assigned")
    ]
    ids = [rollout.rollout_id for rollout in await store.enqueue_many_rollouts(requests)]
    async with serving(store, agent):
        decided = await wait_and_read(store, ids)
    assert [rollout.metadata for rollout in decided] == [keys | {"reward": 0.5}] * 2
    assert [found.reward for found in await store.collect(ids)] == [0.5, 0.5]


async def test_metadata_that_nobody_changed_is_not_sent(store: StoreClient) -> None:
    class Refusing(StoreClient):
        async def finish_attempt(self, *args: Any, **kwargs: Any) -> RolloutState:
            assert kwargs["rollout_metadata"] is None, "sent"
            return await super().finish_attempt(*args, **kwargs)

        async def update_rollout(self, *args: Any, **kwargs: Any) -> Rollout:
            raise AssertionError("sent")

    (decided,) = await run_all(Refusing(store._channel.target), [1], lambda task: 1.0)
    assert decided.status == "succeeded"


async def test_a_note_that_cannot_travel_is_the_agents_failure_and_harms_no_other(store: StoreClient) -> None:
    def agent(task: int, rollout: Rollout) -> float:
        if task:
            rollout.metadata["client"] = threading.Lock()
        return 1.0

    decided = await run_all(store, [0, 1, 0], agent)
    assert [rollout.status for rollout in decided] == ["succeeded", "failed", "succeeded"]
    assert (decided[1].attempt.failure.kind, decided[1].metadata) == ("agent", {})
    assert "cannot be stored" in decided[1].attempt.failure.error
