"""Blocks that are traced by hand: their spans, their store, and what code inside them is given."""

import asyncio
import contextlib
import pickle
from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import get_tracer
from store_helpers import open_box
from unit_helpers import as_agent, make_rollout

from raylight.agent.emit import emit_reward
from raylight.errors import ConfigError
from raylight.runner.local_runner import LitAgentRunner
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.traces.context import current_trace
from raylight.traces.reward_spans import find_final_reward
from raylight.traces.tracer import DummyTracer, OtelTracer, Tracer, get_active_tracer
from raylight.types import Span, TraceStatus


@pytest.fixture(params=[DummyTracer, OtelTracer])
def tracer(request: pytest.FixtureRequest) -> Iterator[Tracer]:
    made = request.param()
    yield made
    made.teardown()


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


def test_a_block_keeps_what_is_recorded_in_it(tracer: Tracer) -> None:
    with tracer.trace_context("root", rollout_id="r", attempt_id="a"):
        tracer.create_span("made", {"k": 1})
        emit_reward(1.0)
    assert current_trace() is None
    spans = tracer.get_last_trace()
    assert names(spans) == ["made", "agentlightning.annotation"], "the name of a block is not a span"
    assert {(span.rollout_id, span.attempt_id) for span in spans} == {("r", "a")}


async def test_an_asynchronous_block_without_ids(tracer: Tracer) -> None:
    async with tracer.trace_context("root"):
        await asyncio.sleep(0)
        emit_reward(1.0)
    (span,) = tracer.get_last_trace()
    assert (span.rollout_id, span.attempt_id) == ("", "")
    async with tracer.trace_context():
        assert tracer.get_last_trace() == []


def test_a_block_that_fails_keeps_its_spans(tracer: Tracer) -> None:
    with contextlib.suppress(KeyError), tracer.trace_context("root"):
        emit_reward(1.0)
        raise KeyError("x")
    assert current_trace() is None
    assert len(tracer.get_last_trace()) == 1


def test_a_block_within_an_attempt_adds_to_it(tracer: Tracer) -> None:
    rollout = make_rollout("r0")
    with tracer.attempt(rollout) as trace:
        with tracer.trace_context():
            tracer.create_span("part")
        with tracer.trace_context(rollout_id="r0", attempt_id=trace.attempt_id):
            tracer.create_span("same")
        with tracer.trace_context(rollout_id="r9", attempt_id="a9"):
            tracer.create_span("other")
        assert current_trace() is trace
    assert names(trace.spans) == ["part", "same"]


def test_opentelemetrys_tracer_is_given_where_its_spans_are_recorded() -> None:
    tracer = OtelTracer()
    with (
        tracer.trace_context() as recorder,
        recorder.start_as_current_span("outer"),
        recorder.start_as_current_span("inner"),
    ):
        emit_reward(1.0)
    reward, inner, outer = tracer.get_last_trace()
    assert (reward.parent_id, inner.parent_id, outer.parent_id) == (inner.span_id, outer.span_id, None)
    tracer.teardown()
    dummy = DummyTracer()
    with dummy.trace_context() as given:
        assert given is dummy


@pytest.mark.parametrize("by_lifespan", [True, False])
async def test_the_spans_of_a_block_go_to_its_store(tracer: Tracer, by_lifespan: bool) -> None:
    async with open_box() as box:
        started = await box.store.start_rollout("task")
        ids = {"rollout_id": started.rollout_id, "attempt_id": started.attempt.attempt_id}
        with tracer.lifespan(box.store if by_lifespan else None):
            async with tracer.trace_context("x", store=None if by_lifespan else box.store, **ids):
                tracer.create_span("first")
            with contextlib.suppress(KeyError):
                async with tracer.trace_context(store=box.store, **ids):
                    emit_reward(0.5)
                    raise KeyError("the agent's own")
            async with tracer.trace_context():
                tracer.create_span("of no attempt")
            copied = pickle.loads(pickle.dumps(tracer))
        stored = await box.store.query_spans(started.rollout_id)
        assert names(stored) == ["first", "agentlightning.annotation"]
        assert find_final_reward(stored) == 0.5
        assert await box.status(started) == ("running", "running")
        assert copied._store is tracer._store is None


async def test_an_inner_lifespan_leaves_the_outer_one_its_store(tracer: Tracer) -> None:
    async with open_box() as box:
        started = await box.store.start_rollout("task")
        with tracer.lifespan(box.store):
            with tracer.lifespan():
                pass
            async with tracer.trace_context(
                rollout_id=started.rollout_id, attempt_id=started.attempt.attempt_id
            ):
                tracer.create_span("after")
        assert names(await box.store.query_spans(started.rollout_id)) == ["after"]


async def test_an_inner_lifespan_without_a_store_uses_the_outer_one(tracer: Tracer) -> None:
    async with open_box() as box:
        started = await box.store.start_rollout("task")
        ids = {"rollout_id": started.rollout_id, "attempt_id": started.attempt.attempt_id}
        runner = LitAgentRunner(tracer).run_context(agent=as_agent(lambda task: 1.0), store=box.store)
        with tracer.lifespan(box.store):
            for inner in (tracer.lifespan(), runner):
                with inner:
                    async with tracer.trace_context(**ids):
                        tracer.create_span("inside")
        assert names(await box.store.query_spans(started.rollout_id)) == ["inside"] * 2


def test_the_lifespan_of_another_tracer_ends_it_within_a_traced_block(tracer: Tracer) -> None:
    exporters: list[InMemorySpanExporter] = []

    def make_exporter() -> InMemorySpanExporter:
        exporters.append(InMemorySpanExporter())
        return exporters[-1]

    other = OtelTracer(exporter=make_exporter)
    with tracer.trace_context():
        for name in ("first", "second"):
            with other.lifespan():
                get_tracer("agent").start_span(name).end()
    exported = [[span.name for span in each.get_finished_spans()] for each in exporters]
    assert exported == [["first"], ["second"]]


def test_a_lifespan_within_a_traced_block_does_not_end_its_recording() -> None:
    tracer, store = OtelTracer(), StoreClient(StoreService())
    runner = LitAgentRunner(tracer).run_context(agent=as_agent(lambda task: 1.0), store=store)
    for inner in (tracer.lifespan(), runner):
        with tracer.lifespan(), tracer.trace_context() as recorder:
            with inner:
                pass
            recorder.start_span("after").end()
        assert names(tracer.get_last_trace()) == ["after"]


async def test_a_block_within_an_attempt_leaves_its_spans_to_the_runner(tracer: Tracer) -> None:
    async with open_box() as box:
        started = await box.store.start_rollout("task")
        with tracer.attempt(started) as trace:
            ids = {"rollout_id": trace.rollout_id, "attempt_id": trace.attempt_id}
            async with tracer.trace_context(store=box.store, **ids):
                tracer.create_span("kept")
        assert await box.store.query_spans(started.rollout_id) == []
        assert names(trace.take()) == ["kept"]


def test_contradictions_are_refused() -> None:
    tracer = DummyTracer()
    with pytest.raises(ConfigError, match="both rollout_id and attempt_id"):
        tracer.trace_context(rollout_id="r")
    with pytest.raises(ConfigError, match="no rollout_id and attempt_id under which"):
        tracer.trace_context(store=object())  # type: ignore[arg-type]
    block = tracer.trace_context(store=object(), rollout_id="r", attempt_id="a")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="write `async with"), block:
        pass


async def test_a_function_runs_in_a_block(tracer: Tracer) -> None:
    def half(reward: float) -> Tracer | None:
        emit_reward(reward / 2)
        return get_active_tracer()

    async def quarter(reward: float) -> Tracer | None:
        return half(reward / 2)

    assert tracer.trace_run(half, 1.0) is tracer
    assert find_final_reward(tracer.get_last_trace()) == 0.5
    assert await tracer.trace_run_async(quarter, reward=1.0) is tracer
    assert find_final_reward(tracer.get_last_trace()) == 0.25
    assert get_active_tracer() is None


def test_the_active_tracer_is_that_of_the_innermost_block() -> None:
    outer, inner = DummyTracer(), DummyTracer()
    with outer.attempt(make_rollout("r0")):
        assert get_active_tracer() is outer
        with inner.trace_context():
            assert get_active_tracer() is inner
        assert get_active_tracer() is outer


def test_a_span_by_hand_has_the_given_time_and_status(tracer: Tracer) -> None:
    failed = TraceStatus(status_code="ERROR", description="late")
    with tracer.trace_context():
        core = tracer.create_span("s", {"k": [1, 2]}, timestamp=5.0, status=failed)
    (span,) = tracer.get_last_trace()
    assert (core.start_time, core.end_time, core.status, core.attributes) == (5.0, 5.0, failed, {"k": [1, 2]})
    assert (span.start_time, span.end_time, span.status, span.attributes) == (5.0, 5.0, failed, {"k": [1, 2]})
    assert tracer.create_span("outside").name == "outside"
    assert len(tracer.get_last_trace()) == 1
