"""Tracers: spans reach the trace of their own attempt, and tracing never fails or delays the agent."""

import asyncio
import functools
import gc
import logging
import pickle
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

import cloudpickle
import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import (
    ConcurrentMultiSpanProcessor,
    ReadableSpan,
    SpanLimits,
    SpanProcessor,
    TracerProvider,
)
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import NonRecordingSpan, NoOpTracerProvider, Status, StatusCode
from unit_helpers import make_rollout

from raylight.errors import ConfigError, TracerError
from raylight.semconv import ATTEMPT_ID, ROLLOUT_ID
from raylight.traces import otel as capture_module
from raylight.traces import tracer as tracer_module
from raylight.traces.context import AttemptTrace, current_trace, tracing
from raylight.traces.tracer import DummyTracer, OtelTracer
from raylight.types import Rollout, Span


@pytest.fixture(autouse=True)
def _no_last_trace(no_provider: None) -> None:
    tracer_module._LAST.set(None)


@pytest.fixture
def tracer() -> Iterator[OtelTracer]:
    made = OtelTracer()
    made.setup()
    yield made
    made.teardown()


def rollout(number: int = 0) -> Rollout:
    return make_rollout(f"r{number}", attempt_id=f"a{number}")


def sdk() -> otel.Tracer:
    return otel.get_tracer("agent")


def names(trace: AttemptTrace) -> list[str]:
    return [span.name for span in trace.spans]


def in_threads(*works: Callable[[], object]) -> None:
    """Run functions at the same time, each in a thread."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


# ---- what is caught


def test_a_span_is_converted_and_keyed(tracer: OtelTracer) -> None:
    with tracer.attempt(rollout()) as trace, sdk().start_as_current_span("outer") as outer:
        with sdk().start_as_current_span(
            "inner", attributes={"n": 1, "ids": [1, 2], "raw": b"\xff\x00"}
        ) as inner:
            inner.add_event("e", {"k": "v"})
            inner.set_status(Status(StatusCode.ERROR, "bad"))
        outer.set_attribute("late", True)
    first, second = trace.spans
    assert (first.name, second.name) == ("inner", "outer")
    assert {(s.rollout_id, s.attempt_id) for s in (first, second)} == {("r0", "a0")}
    assert first.parent_id == second.span_id
    assert first.trace_id == second.trace_id == f"{outer.get_span_context().trace_id:032x}"
    # older releases of the SDK drop bytes that are not text
    assert {"raw": "ff00"} | first.attributes == {"n": 1, "ids": (1, 2), "raw": "ff00"}
    assert first.events[0].name == "e"
    assert first.status.model_dump() == {"status_code": "ERROR", "description": "bad"}
    assert second.attributes == {"late": True}
    assert second.resource.attributes["service.name"] == "raylight"
    assert second.end_time is not None
    assert second.start_time is not None
    assert second.end_time >= first.end_time >= first.start_time >= second.start_time


def test_a_span_outside_of_any_attempt_passes_untouched(tracer: OtelTracer) -> None:
    with sdk().start_as_current_span("alone") as span:
        pass
    assert isinstance(span, ReadableSpan)
    assert dict(span.attributes or {}) == {}
    assert not hasattr(span, capture_module.OWNER)
    assert tracer.failed == 0
    assert tracer.get_last_trace() == []


def test_a_span_of_no_attempt_does_not_join_the_one_that_runs_when_it_ends(tracer: OtelTracer) -> None:
    before = sdk().start_span("before")
    with tracer.attempt(rollout()) as trace:
        before.end()
    assert names(trace) == []


def test_a_span_goes_to_the_attempt_that_started_it(tracer: OtelTracer) -> None:
    with tracer.attempt(rollout(1)) as one:
        span = sdk().start_span("of one")
    with tracer.attempt(rollout(2)) as two:
        span.end()
    assert names(one) == ["of one"]
    assert names(two) == []


async def test_attempts_interleaved_on_one_loop_never_mix(tracer: OtelTracer) -> None:
    async def agent(number: int) -> AttemptTrace:
        with tracer.attempt(rollout(number)) as trace:
            for step in range(5):
                with sdk().start_as_current_span(f"{number}"):
                    await asyncio.gather(*(step_of(number) for _ in range(2)))
                await asyncio.sleep(0)
                assert len(tracer.get_last_trace()) == (step + 1) * 3
        return trace

    async def step_of(number: int) -> None:
        with sdk().start_as_current_span(f"{number}"):
            await asyncio.sleep(0)

    for number, trace in enumerate(await asyncio.gather(*(agent(number) for number in range(20)))):
        assert names(trace) == [f"{number}"] * 15
        assert {span.rollout_id for span in trace.spans} == {f"r{number}"}
        assert len({span.trace_id for span in trace.spans}) == 5
    assert tracer.failed == 0


def test_attempts_in_threads_never_mix(tracer: OtelTracer) -> None:
    traces: dict[int, AttemptTrace] = {}
    start = threading.Barrier(8)

    def agent(number: int) -> None:
        with tracer.attempt(rollout(number)) as trace:
            start.wait()
            for _ in range(200):
                with sdk().start_as_current_span(f"{number}"), sdk().start_as_current_span(f"{number}"):
                    pass
        traces[number] = trace

    in_threads(*(functools.partial(agent, number) for number in range(8)))
    for number, trace in traces.items():
        assert names(trace) == [f"{number}"] * 400
        assert len({span.span_id for span in trace.spans}) == 400


def test_a_thread_with_opentelemetrys_context_keeps_the_attempt(tracer: OtelTracer) -> None:
    with tracer.attempt(rollout()) as trace, sdk().start_as_current_span("parent"):
        carried = otel_context.get_current()

        def attached() -> None:
            assert current_trace() is None
            token = otel_context.attach(carried)
            with sdk().start_as_current_span("child"):
                sdk().start_span("grandchild").end()
            otel_context.detach(token)
            sdk().start_span("explicit", context=carried).end()
            sdk().start_span("orphan").end()

        in_threads(attached)
    assert names(trace) == ["grandchild", "child", "explicit", "parent"]


def test_a_child_of_a_span_that_has_ended_keeps_the_attempt(tracer: OtelTracer) -> None:
    with tracer.attempt(rollout()) as trace:
        with sdk().start_as_current_span("parent"):
            carried = otel_context.get_current()
        in_threads(lambda: sdk().start_span("child", context=carried).end())
    assert names(trace) == ["parent", "child"]


def test_a_parent_known_by_its_ids_alone_is_found(tracer: OtelTracer) -> None:
    """The agent calls a server in its own process, which receives the parent by a header."""
    with tracer.attempt(rollout()) as trace, sdk().start_as_current_span("client") as client:
        remote = otel.set_span_in_context(NonRecordingSpan(client.get_span_context()), otel_context.Context())
        in_threads(lambda: sdk().start_span("server", context=remote).end())
    assert names(trace) == ["server", "client"]


def test_the_attempt_goes_before_the_parent(tracer: OtelTracer) -> None:
    """An agent may run another attempt's code within its own span."""
    with (
        tracer.attempt(rollout(1)) as one,
        sdk().start_as_current_span("one"),
        tracer.attempt(rollout(2)) as two,
    ):
        sdk().start_span("two").end()
    assert (names(one), names(two)) == (["one"], ["two"])


def test_copied_context_in_a_thread(tracer: OtelTracer) -> None:
    with tracer.attempt(rollout()) as trace:
        carried = copy_context()
        in_threads(lambda: carried.run(lambda: sdk().start_span("in a pool").end()))
    assert names(trace) == ["in a pool"]


def test_spans_that_end_after_the_decision_are_dropped_and_counted(tracer: OtelTracer) -> None:
    with tracer.attempt(rollout()) as trace:
        late = sdk().start_span("late")
    trace.close()
    late.end()
    assert names(trace) == []
    assert trace.dropped == 1
    assert tracer.failed == 0


# ---- what it costs the agent


def test_an_error_in_conversion_is_counted_and_never_reaches_the_agent(
    tracer: OtelTracer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any, **kwargs: Any) -> Span:
        raise ValueError("no")

    with tracer.attempt(rollout()) as trace:
        monkeypatch.setattr(capture_module.Span, "from_opentelemetry", broken)
        with (
            caplog.at_level(logging.WARNING),
            sdk().start_as_current_span("lost"),
            sdk().start_as_current_span("lost too"),
        ):
            pass
        monkeypatch.undo()
    assert names(trace) == []
    assert tracer.failed == 2
    assert [bool(record.exc_info) for record in caplog.records] == [True, False]


def test_an_error_at_the_start_is_counted_too(tracer: OtelTracer, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("no")

    with tracer.attempt(rollout()) as trace, monkeypatch.context() as patch:
        patch.setattr(capture_module, "current_trace", broken)
        sdk().start_span("lost").end()
    assert (names(trace), tracer.failed) == ([], 1)


def test_spans_that_never_end_leave_nothing_behind(tracer: OtelTracer) -> None:
    open_spans = tracer._capture._open  # type: ignore[union-attr]
    before = len(open_spans)
    with tracer.attempt(rollout()) as trace:
        for _ in range(100):
            sdk().start_span("never ends")
        for _ in range(100):
            sdk().start_span("ends").end()
        assert len(open_spans) == before + 100
    gone = weakref.ref(trace)
    del trace
    with tracer.attempt(rollout(1)):  # the last trace of this context is another one now
        gc.collect(1)  # the objects of this test
        assert gone() is None
    assert len(open_spans) == before


def test_long_conversations_are_not_cut(tracer: OtelTracer) -> None:
    """The SDK keeps 128 attributes of a span and drops the oldest."""
    prompts = {f"gen_ai.prompt.{i}.content": "hello" for i in range(1000)}
    with tracer.attempt(rollout()) as trace:
        sdk().start_span("chat", attributes=prompts).end()
    assert trace.spans[0].attributes == prompts
    assert tracer.truncated == 0


def test_what_a_foreign_provider_cuts_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    otel.set_tracer_provider(TracerProvider(span_limits=SpanLimits(max_span_attributes=4)))
    tracer = OtelTracer()
    with tracer.attempt(rollout()) as trace:
        for _ in range(2):
            sdk().start_span("chat", attributes={f"k{i}": i for i in range(10)}).end()
    tracer.teardown()
    assert tracer.truncated == 2
    assert len(trace.spans[0].attributes) == 4
    assert caplog.text.count("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT") == 1


# ---- providers


def test_it_joins_a_provider_that_is_there() -> None:
    seen = InMemorySpanExporter()

    class Theirs(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            seen.export([span])

    provider = TracerProvider()
    provider.add_span_processor(Theirs())
    otel.set_tracer_provider(provider)
    tracer = OtelTracer(service_name="ours")
    with tracer.attempt(rollout()) as trace:
        sdk().start_span("both").end()
    tracer.teardown()
    assert otel.get_tracer_provider() is provider
    assert names(trace) == [span.name for span in seen.get_finished_spans()] == ["both"]
    assert ROLLOUT_ID not in seen.get_finished_spans()[0].resource.attributes
    assert trace.spans[0].resource.attributes["service.name"] != "ours"


def test_two_tracers_and_many_setups_hear_a_span_once() -> None:
    first, second = OtelTracer(), OtelTracer()
    for tracer in (first, first, second):
        tracer.setup()
    with first.attempt(rollout()) as trace:
        sdk().start_span("once").end()
    first.teardown()
    with second.attempt(rollout()) as other:
        sdk().start_span("still heard").end()
    second.teardown()
    second.teardown()
    assert (names(trace), names(other)) == (["once"], ["still heard"])
    with tracing(AttemptTrace("r", "a")) as after:
        sdk().start_span("after teardown").end()
    assert names(after) == []
    with second.attempt(rollout()) as again:
        sdk().start_span("set up again").end()
    second.teardown()
    assert names(again) == ["set up again"]


def test_setup_from_many_threads_is_one_setup() -> None:
    tracer = OtelTracer()
    in_threads(*[tracer.setup] * 16)
    with tracer.attempt(rollout()) as trace:
        sdk().start_span("once").end()
    assert names(trace) == ["once"]
    assert tracer._capture._tracers == 1
    tracer.teardown()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (NoOpTracerProvider, r"NoOpTracerProvider.*DummyTracer"),
        (
            lambda: TracerProvider(active_span_processor=ConcurrentMultiSpanProcessor()),
            "ConcurrentMultiSpanProcessor",
        ),
    ],
    ids=["no processors", "processors in threads"],
)
def test_a_provider_that_does_not_call_processors_in_order_is_an_error(make: Any, message: str) -> None:
    otel.set_tracer_provider(make())
    with pytest.raises(TracerError, match=message):
        OtelTracer().setup()


def test_a_disabled_sdk_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    with pytest.raises(TracerError, match="OTEL_SDK_DISABLED"):
        OtelTracer().setup()


def test_sampling_by_environment_loses_no_span_of_an_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracer = OtelTracer()
    with tracer.attempt(rollout()) as trace:
        sdk().start_span("kept").end()
    tracer.teardown()
    assert names(trace) == ["kept"]


def test_bad_arguments() -> None:
    with pytest.raises(ConfigError, match="both"):
        DummyTracer().trace_context(rollout_id="r")
    without = rollout().model_copy(update={"attempt": None})
    with pytest.raises(TracerError, match="r0 has no attempt"), DummyTracer().attempt(without):
        pass
    with pytest.raises(ConfigError, match="class or function"):
        OtelTracer(exporter=InMemorySpanExporter())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="are both given"):
        OtelTracer(exporter=InMemorySpanExporter, export_endpoint="http://x")
    with pytest.raises(ConfigError, match="headers"):
        OtelTracer(headers={"a": "b"})
    with pytest.raises(ConfigError, match=r"http\(s\)"):
        OtelTracer(export_endpoint="collector:4318")


async def test_the_last_trace_is_of_this_context_only() -> None:
    tracer = DummyTracer()

    async def one(number: int) -> list[Span]:
        with tracer.attempt(rollout(number)) as trace:
            trace.add(Span.from_attributes(name=f"{number}", attributes={}))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        return tracer.get_last_trace()

    traces = await asyncio.gather(*(one(number) for number in range(3)))
    assert [[span.name for span in spans] for spans in traces] == [["0"], ["1"], ["2"]]


# ---- travelling


def test_tracers_travel_after_setup_too() -> None:
    tracer = OtelTracer(
        export_endpoint="http://127.0.0.1:1", headers={"authorization": "Bearer x"}, export_timeout=0.1
    )
    tracer.setup()
    for copied in (pickle.loads(pickle.dumps(tracer)), cloudpickle.loads(cloudpickle.dumps(tracer))):
        assert copied.export_endpoint == "http://127.0.0.1:1/v1/traces"
        assert (copied._is_set_up, copied._capture, copied._export, copied.failed) == (False, None, None, 0)
        with copied.attempt(rollout()):
            assert copied._is_set_up
        copied.teardown()
    tracer.teardown()
    assert isinstance(pickle.loads(pickle.dumps(DummyTracer())), DummyTracer)
    factory = cloudpickle.loads(
        cloudpickle.dumps(OtelTracer(exporter=functools.partial(InMemorySpanExporter)))
    )
    assert isinstance(factory._make_exporter(), InMemorySpanExporter)


def test_it_is_light_until_setup() -> None:
    code = (
        "import sys\nfrom raylight.traces.tracer import DummyTracer, OtelTracer\n"
        "with DummyTracer().trace_context('x'): pass\nOtelTracer()\n"
        "loaded = [m for m in sys.modules if m.startswith('opentelemetry')]\nassert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- export


class Held(SpanExporter):
    """Exporter that stores spans, after waiting for `open`."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []
        self.open = threading.Event()
        self.open.set()
        self.shut = 0

    def export(self, spans: Any) -> SpanExportResult:
        self.open.wait(30)
        self.spans += spans
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self.shut += 1
        self.open.set()


def test_exported_spans_name_their_attempt() -> None:
    held = Held()
    tracer = OtelTracer(service_name="svc", exporter=lambda: held)
    for number in range(2):
        with tracer.attempt(rollout(number)), sdk().start_as_current_span("a") as live:
            sdk().start_span("b", attributes={"k": 1}).end()
    sdk().start_span("of no attempt").end()
    tracer.teardown()
    found = [
        (s.name, s.resource.attributes[ROLLOUT_ID], s.resource.attributes[ATTEMPT_ID]) for s in held.spans
    ]
    assert sorted(found) == [("a", "r0", "a0"), ("a", "r1", "a1"), ("b", "r0", "a0"), ("b", "r1", "a1")]
    assert {s.resource.attributes["service.name"] for s in held.spans} == {"svc"}
    assert ROLLOUT_ID not in live.resource.attributes  # type: ignore[attr-defined]
    assert held.shut == 1


def test_a_slow_collector_costs_the_agent_nothing_and_teardown_ends_in_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = Held()
    held.open.clear()
    tracer = OtelTracer(exporter=lambda: held, export_timeout=0.05)
    with tracer.attempt(rollout()) as trace:
        for _ in range(600):
            sdk().start_span("a").end()
    began = time.monotonic()
    tracer.teardown()
    assert time.monotonic() - began < 60
    assert len(trace.spans) == 600
    assert "not exported within 0.05 s" in caplog.text
    assert tracer.failed == 0


def test_the_provider_flushes_and_shuts_down_exports() -> None:
    held = Held()
    tracer = OtelTracer(exporter=lambda: held)
    with tracer.attempt(rollout()):
        sdk().start_span("a").end()
    provider: Any = otel.get_tracer_provider()
    assert provider.force_flush()
    assert len(held.spans) == 1
    held.open.clear()
    with tracer.attempt(rollout()):
        sdk().start_span("b").end()
    assert not provider.force_flush(timeout_millis=20)
    held.open.set()
    provider.shutdown()
    assert [span.name for span in held.spans] == ["a", "b"]
    tracer.teardown()


def test_spans_are_flushed_when_the_interpreter_exits() -> None:
    code = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace.export import ConsoleSpanExporter
from raylight.traces.tracer import OtelTracer
tracer = OtelTracer(exporter=ConsoleSpanExporter)
with tracer.trace_context(rollout_id="r", attempt_id="a"):
    trace.get_tracer("x").start_span("the last word").end()
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "the last word" in out.stdout
    assert out.stderr == ""
