"""Operations: functions and blocks as nested spans with input and output."""

import asyncio
import gc
import inspect
import json
import threading
import weakref
from collections.abc import Iterator
from contextvars import copy_context
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider

from raylight.agent.emit import emit_message, get_message_value
from raylight.agent.operations import MAX_ITEMS, operation
from raylight.agent.resources import LLM
from raylight.errors import EmitError
from raylight.traces.context import AttemptTrace, tracing
from raylight.traces.tracer import OtelTracer
from raylight.types import Span, SpanCoreFields

IN, OUT, NAME = (f"agentlightning.operation.{key}" for key in ("input", "output", "name"))


pytestmark = pytest.mark.usefixtures("no_provider")


@pytest.fixture
def tracer(no_provider: None) -> Iterator[OtelTracer]:
    made = OtelTracer()
    made.setup()
    yield made
    made.teardown()


@pytest.fixture(params=["plain", "otel"])
def trace(request: pytest.FixtureRequest) -> Iterator[AttemptTrace]:
    """The trace of an attempt, with and without OpenTelemetry: both record operations in the same way."""
    if request.param == "otel":
        request.getfixturevalue("tracer")
    before = otel_context.get_current()
    with tracing(AttemptTrace("ro-1", "at-1")) as current:
        yield current
    assert otel_context.get_current() == before


def sdk() -> otel.Tracer:
    return otel.get_tracer("library")


def only(trace: AttemptTrace) -> Span:
    (span,) = trace.spans
    return span


# functions


def test_a_function_is_recorded_and_stays_itself(trace: AttemptTrace) -> None:
    @operation
    def search(query: str, limit: int = 3, *rest: int, **options: Any) -> list[str]:
        """Find things."""
        return [query] * limit

    assert search("x", 2, 7, deep={"a": [1, None]}) == ["x", "x"]
    assert (search.__name__, search.__doc__) == ("search", "Find things.")
    assert str(inspect.signature(search)).startswith("(query")
    span = only(trace)
    assert (span.name, span.status.status_code, span.rollout_id) == ("agentlightning.operation", "OK", "ro-1")
    found = {
        key: list(value) if isinstance(value, tuple) else value for key, value in span.attributes.items()
    }
    assert found == {
        NAME: "search",
        f"{IN}.query": "x",
        f"{IN}.limit": 2,
        f"{IN}.rest": [7],
        f"{IN}.options.deep.a.0": 1,
        f"{IN}.options.deep.a.1": "null",
        OUT: ["x", "x"],
    }
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.end_time >= span.start_time


def test_names_and_attributes_are_given_in_brackets(trace: AttemptTrace) -> None:
    @operation(name="find", source={"kind": "wiki"})
    def search() -> None: ...

    @operation()
    def other() -> None: ...

    search()
    other()
    first, second = (span.attributes for span in trace.spans)
    assert first == {NAME: "find", "source.kind": "wiki", OUT: "null"}
    assert second == {NAME: "other", OUT: "null"}


async def test_a_coroutine_function_is_recorded(trace: AttemptTrace) -> None:
    @operation
    async def work(n: int) -> dict:
        await asyncio.sleep(0)
        emit_message("inside")
        return {"n": n}

    assert asyncio.iscoroutinefunction(work)
    assert await work(3) == {"n": 3}
    message, span = trace.spans
    assert span.attributes == {NAME: "work", f"{IN}.n": 3, f"{OUT}.n": 3}
    assert (message.parent_id, message.trace_id) == (span.span_id, span.trace_id)


def test_methods_are_recorded_without_their_object(trace: AttemptTrace) -> None:
    class Tool:
        @operation
        def use(self, x: int) -> int:
            return x

        @classmethod
        @operation
        def make(cls, x: int) -> int:
            return x

        @staticmethod
        @operation
        def help(x: int) -> int:
            return x

    assert (Tool().use(1), Tool.make(2), Tool.help(3)) == (1, 2, 3)
    assert [set(span.attributes) for span in trace.spans] == [{NAME, f"{IN}.x", OUT}] * 3


def test_inputs_are_recorded_as_they_were_when_the_call_began(trace: AttemptTrace) -> None:
    operation(lambda items: items.clear())([1, 2])
    assert list(only(trace).attributes[f"{IN}.items"]) == [1, 2]


def test_whatever_goes_in_the_agent_does_not_fail(trace: AttemptTrace) -> None:
    class Nasty(dict):
        def items(self) -> Any:
            raise RuntimeError

    endless: list[Any] = []
    endless.append(endless)
    deep = {1: {"x": object()}}
    assert operation(lambda a, b, c, d: b)(Nasty(x=1), endless, deep, range(3)) is endless
    attributes = only(trace).attributes
    assert attributes[f"{IN}.d"] == '"range(0, 3)"'
    assert "x" in attributes[f"{IN}.c"]


class Unbound:
    """An object whose attributes cannot be read, as werkzeug's proxies outside of their context."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("not bound")


@pytest.mark.parametrize(
    ("odd", "recorded"),
    [
        (Unbound(), "Unbound"),
        ([Unbound(), 1], "1"),
        (weakref.proxy(Unbound()), "<weakref.ProxyType>"),
        (10**5000, "<builtins.int>"),
        ([10**5000, 1], "<builtins.list>"),
    ],
    ids=["unbound", "within a list", "dead", "large", "large within a list"],
)
def test_values_that_cannot_be_read_do_not_fail_the_agent(
    trace: AttemptTrace, odd: Any, recorded: str
) -> None:
    assert operation(lambda value: value)(odd) is odd
    attributes = only(trace).attributes
    assert any(recorded in json.dumps(value) for name, value in attributes.items() if name.startswith(IN))
    assert any(recorded in json.dumps(value) for name, value in attributes.items() if name.startswith(OUT))


def test_a_big_argument_is_one_attribute(trace: AttemptTrace) -> None:
    operation(lambda big: None)([{"n": n} for n in range(1000)])
    assert len(only(trace).attributes) == 3
    assert only(trace).attributes[f"{IN}.big"].startswith('[{"n": 0}, ')


def test_a_models_key_is_not_recorded(trace: AttemptTrace) -> None:
    operation(lambda llm: None)(LLM(model="m", api_key="secret"))
    assert "secret" not in str(only(trace).attributes)


def test_a_wrong_call_fails_as_it_would_without(trace: AttemptTrace) -> None:
    @operation
    def work(a: int) -> None: ...

    with pytest.raises(TypeError, match="unexpected keyword argument 'b'"):
        work(1, b=2)  # type: ignore[call-arg]
    assert only(trace).attributes == {NAME: "work", f"{IN}.args.0": 1, f"{IN}.b": 2}


def test_functions_without_a_signature_are_recorded(trace: AttemptTrace) -> None:
    assert operation(max)(1, 2) == 2
    assert only(trace).attributes == {NAME: "max", f"{IN}.args.0": 1, f"{IN}.args.1": 2, OUT: 2}


def test_an_operation_has_one_name() -> None:
    with pytest.raises(EmitError, match="got both name= and the attribute"):
        operation(name="a", **{"agentlightning.operation.name": "b"})


@pytest.mark.parametrize("thing", ["search", 3, classmethod(len)])
def test_only_functions_are_decorated(thing: Any) -> None:
    with pytest.raises(EmitError, match=r"operation decorates a function.*operation\(name="):
        operation(thing)


# failures


async def test_an_exception_is_recorded_and_goes_on(trace: AttemptTrace) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    @operation
    def fails(error: type[BaseException]) -> None:
        raise error("bad")

    @operation
    async def fails_later(error: type[BaseException]) -> None:
        raise error("bad")

    for error in (ValueError, KeyboardInterrupt, StopIteration, Odd):
        with pytest.raises(error):
            fails(error)
    with pytest.raises(asyncio.CancelledError):
        await fails_later(asyncio.CancelledError)
    assert [span.status.status_code for span in trace.spans] == ["ERROR"] * 5
    span = trace.spans[0]
    assert span.status.description == "ValueError: bad"
    (event,) = span.events
    described = (event.attributes["exception.type"], event.attributes["exception.message"])
    assert (event.name, *described) == ("exception", "ValueError", "bad")
    assert "in fails" in event.attributes["exception.stacktrace"]
    assert OUT not in span.attributes
    assert trace.spans[3].status.description == "Odd: (its message cannot be read: RuntimeError)"


# blocks


def test_a_block_records_what_it_is_told(trace: AttemptTrace) -> None:
    with operation(name="plan", user=3) as op:
        op.set_input(1, {"a": 2}, task="t")
        op.set_output([1.5])
        with pytest.raises(EmitError, match="until its block ends"):
            op.span()
    span = only(trace)
    inputs = {f"{IN}.args.0": 1, f"{IN}.args.1.a": 2, f"{IN}.task": "t"}
    attributes = {NAME: "plan", "user": 3, **inputs, OUT: [1.5]}
    assert {**span.attributes, OUT: list(span.attributes[OUT])} == attributes
    core = op.span()
    assert isinstance(core, SpanCoreFields)
    assert core.attributes == attributes
    with op:
        pass
    assert len(trace.spans) == 2
    assert OUT not in trace.spans[1].attributes


def test_a_block_that_fails_is_recorded(trace: AttemptTrace) -> None:
    with pytest.raises(ZeroDivisionError), operation() as op:
        _ = 1 / 0
    assert only(trace).status.status_code == op.span().status.status_code == "ERROR"


def test_a_block_is_one_at_a_time(trace: AttemptTrace) -> None:
    op = operation()
    for call in (lambda: op.set_input(1), lambda: op.set_output(1)):
        with pytest.raises(EmitError, match="only be set within the block"):
            call()
    with op, pytest.raises(EmitError, match="new operation"), op:
        pass
    assert len(trace.spans) == 1


# outside of an attempt


async def test_outside_of_an_attempt_functions_run_as_they_are() -> None:
    @operation
    def plain(x: int) -> int:
        return x

    @operation
    async def later(x: int) -> int:
        return x

    @operation
    def items(n: int) -> Any:
        got = yield from range(n)
        return got

    @operation
    async def items_later(n: int) -> Any:
        for i in range(n):
            yield i

    assert (plain(1), await later(2)) == (1, 2)
    assert list(items(2)) == [i async for i in items_later(2)] == [0, 1]
    with operation(name="block") as op:
        op.set_output(3)
    assert op.span().attributes == {NAME: "block", OUT: 3}


def test_without_propagation_nothing_reaches_the_attempt(trace: AttemptTrace) -> None:
    operation(lambda: 1, propagate=False)()
    with operation(propagate=False) as op:
        emit_message("m")
    assert only(trace).parent_id is None
    assert get_message_value(only(trace)) == "m"
    assert op.span().attributes == {}


# nesting


def test_nested_operations_get_their_parents(trace: AttemptTrace) -> None:
    @operation
    def inner() -> None:
        emit_message("m")

    @operation
    def outer() -> None:
        inner()
        emit_message("n")

    with operation(name="block"):
        outer()
    emit_message("after")
    message, inner_span, second, outer_span, block, after = trace.spans
    assert message.parent_id == inner_span.span_id
    assert inner_span.parent_id == second.parent_id == outer_span.span_id
    assert outer_span.parent_id == block.span_id
    assert (block.parent_id, after.parent_id) == (None, None)
    assert len({span.trace_id for span in trace.spans[:-1]}) == 1


async def test_siblings_of_concurrent_tasks_do_not_nest_in_one_another(trace: AttemptTrace) -> None:
    @operation
    async def child(n: int) -> None:
        await asyncio.sleep(0)
        emit_message(str(n))
        await asyncio.sleep(0)

    with operation():
        async with asyncio.TaskGroup() as group:
            for n in range(10):
                group.create_task(child(n))
    *spans, root = trace.spans
    children = {span.span_id: span.attributes[f"{IN}.n"] for span in spans if NAME in span.attributes}
    assert {span.parent_id for span in spans if NAME in span.attributes} == {root.span_id}
    for span in spans:
        if NAME not in span.attributes:
            assert get_message_value(span) == str(children[span.parent_id or ""])


def test_an_operation_started_in_a_thread_nests_by_copied_context(trace: AttemptTrace) -> None:
    @operation
    def child() -> None: ...

    with operation():
        thread = threading.Thread(target=copy_context().run, args=(child,))
        thread.start()
        thread.join()
    first, second = trace.spans
    assert first.parent_id == second.span_id


def test_an_operation_within_a_librarys_span_hangs_below_it() -> None:
    provider = TracerProvider()
    outside = provider.get_tracer("t").start_as_current_span("library")
    with tracing(AttemptTrace("ro-1", "at-1")) as trace, outside as library, operation():
        emit_message("m")
        with provider.get_tracer("t").start_as_current_span("deeper") as deeper:
            emit_message("n")
    message, second, span = trace.spans
    assert span.parent_id == otel.format_span_id(library.get_span_context().span_id)
    assert message.parent_id == span.span_id
    assert second.parent_id == otel.format_span_id(deeper.get_span_context().span_id)


def test_a_tracer_hangs_libraries_below_the_operation(tracer: OtelTracer) -> None:
    with (
        tracing(AttemptTrace("ro-1", "at-1")) as trace,
        sdk().start_as_current_span("root"),
        operation(name="op"),
    ):
        with sdk().start_as_current_span("call"):
            emit_message("m")
        parent = otel_context.get_current()
        thread = threading.Thread(target=lambda: sdk().start_span("elsewhere", context=parent).end())
        thread.start()  # it has only OpenTelemetry's context
        thread.join()
    by_name = {span.name: span for span in trace.spans}
    assert len(by_name) == len(trace.spans) == 5
    op = by_name["agentlightning.operation"]
    assert by_name["call"].parent_id == by_name["elsewhere"].parent_id == op.span_id
    assert by_name["agentlightning.message"].parent_id == by_name["call"].span_id
    assert op.parent_id == by_name["root"].span_id
    assert len({span.trace_id for span in trace.spans}) == 1


def test_after_the_tracer_an_operation_is_recorded_without_it(tracer: OtelTracer) -> None:
    tracer.teardown()
    with tracing(AttemptTrace("ro-1", "at-1")) as trace, operation():
        pass
    assert len(trace.spans) == 1


async def test_attempts_interleaved_on_one_loop_never_mix(tracer: OtelTracer) -> None:
    @operation
    async def work(number: int) -> None:
        await asyncio.sleep(0)
        emit_message(str(number))
        await asyncio.to_thread(operation(lambda: None))

    async def agent(number: int) -> AttemptTrace:
        with tracing(AttemptTrace(f"ro-{number}", "at-1")) as trace:
            for _ in range(4):
                await work(number)
        return trace

    for number, trace in enumerate(await asyncio.gather(*(agent(number) for number in range(20)))):
        assert len(trace.spans) == 12
        assert {span.rollout_id for span in trace.spans} == {f"ro-{number}"}
        assert {span.attributes.get(f"{IN}.number", number) for span in trace.spans} == {number}
        ids = {span.span_id for span in trace.spans}
        assert all(span.parent_id is None or span.parent_id in ids for span in trace.spans)


def test_an_operation_that_ends_after_its_attempt_changes_nothing(trace: AttemptTrace) -> None:
    op = operation()
    op.__enter__()
    trace.close()
    op.__exit__(None, None, None)
    assert (trace.spans, trace.dropped) == ([], 1)


# generators


def test_a_generator_is_recorded_while_its_own_code_runs(trace: AttemptTrace) -> None:
    @operation
    def count(n: int) -> Iterator[int]:
        for i in range(n):
            emit_message("own")
            yield i

    got = []
    for item in count(2):
        emit_message("consumer's")
        got.append(item)
    assert got == [0, 1]
    assert inspect.isgeneratorfunction(count)
    *messages, span = trace.spans
    said = [(get_message_value(message), message.parent_id) for message in messages]
    assert said == [("own", span.span_id), ("consumer's", None)] * 2
    assert {**span.attributes, OUT: list(span.attributes[OUT])} == {NAME: "count", f"{IN}.n": 2, OUT: [0, 1]}


def test_generators_answer_send_throw_and_return(trace: AttemptTrace) -> None:
    @operation
    def talk() -> Any:
        heard = []
        while True:
            try:
                heard.append((yield len(heard)))
            except KeyError as error:
                heard.append(repr(error))
                return heard

    talking = talk()
    assert [next(talking), talking.send("a"), talking.send("b")] == [0, 1, 2]
    with pytest.raises(StopIteration) as stop:
        talking.throw(KeyError("k"))
    assert stop.value.value == ["a", "b", "KeyError('k')"]
    assert only(trace).status.status_code == "OK"


async def test_asynchronous_generators_too(trace: AttemptTrace) -> None:
    closed = []

    @operation
    async def talk() -> Any:
        heard: list[Any] = []
        try:
            while True:
                try:
                    heard.append((yield len(heard)))
                except KeyError:
                    emit_message("caught")
                    heard.append("error")
        finally:
            closed.append(True)

    talking = talk()
    assert inspect.isasyncgenfunction(talk)
    assert [await anext(talking), await talking.asend("a"), await talking.athrow(KeyError("k"))] == [0, 1, 2]
    emit_message("outside")
    await talking.aclose()
    caught, outside, span = trace.spans
    assert (caught.parent_id, outside.parent_id) == (span.span_id, None)
    assert (closed, span.status.status_code, list(span.attributes[OUT])) == ([True], "OK", [0, 1, 2])


async def test_a_generator_that_fails_or_is_left_early_ends_its_span(trace: AttemptTrace) -> None:
    @operation
    def failing() -> Any:
        yield 1
        raise ValueError("bad")

    @operation
    async def failing_later() -> Any:
        yield 1
        raise ValueError("bad")

    with pytest.raises(ValueError, match="bad"):
        list(failing())
    with pytest.raises(ValueError, match="bad"):
        [item async for item in failing_later()]
    left = failing()
    next(left)
    left.close()
    abandoned = failing()
    next(abandoned)
    del abandoned
    gc.collect(1)  # the objects of this test
    assert [span.status.status_code for span in trace.spans] == ["ERROR", "ERROR", "OK", "OK"]
    assert [list(span.attributes[OUT]) for span in trace.spans] == [[1]] * 4


def test_the_recorded_items_of_a_generator_are_bounded(trace: AttemptTrace) -> None:
    assert sum(1 for _ in operation(lambda n: (yield from range(n)))(MAX_ITEMS + 5)) == MAX_ITEMS + 5
    assert len(only(trace).attributes[OUT]) == MAX_ITEMS


async def test_a_block_in_a_generator_that_another_context_closes_does_not_fail(trace: AttemptTrace) -> None:
    async def items() -> Any:
        with operation(name="op"):
            yield 1

    async def start(generator: Any) -> None:
        await anext(generator)

    generator = items()
    await asyncio.create_task(start(generator))
    await generator.aclose()
    assert only(trace).attributes == {NAME: "op"}
