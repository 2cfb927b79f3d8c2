"""Emitters: spans go to the running attempt only, and their values can be read back."""

import asyncio
import enum
import math
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import trace as otel
from opentelemetry.sdk.trace import TracerProvider
from pydantic import BaseModel

from raylight import semconv
from raylight.agent.attributes import as_attributes, flatten
from raylight.agent.emit import (
    emit_annotation,
    emit_exception,
    emit_message,
    emit_object,
    emit_reward,
    emit_state,
    get_message_value,
    get_object_value,
    reward,
)
from raylight.errors import EmitError, RewardError
from raylight.traces.context import AttemptTrace, tracing
from raylight.traces.reward_spans import find_final_reward, get_rewards_from_span
from raylight.types import Span, SpanCoreFields

EMITTERS = [
    lambda **more: emit_reward(1.0, **more),
    lambda **more: emit_annotation({"a": 1}, **more),
    lambda **more: emit_message("hello", **more),
    lambda **more: emit_object([1], **more),
    lambda **more: emit_exception(ValueError("bad"), **more),
]


@pytest.fixture
def trace() -> Iterator[AttemptTrace]:
    with tracing(AttemptTrace("ro-1", "at-1")) as current:
        yield current


@pytest.mark.parametrize("emit", EMITTERS)
def test_an_emitter_returns_what_it_adds(trace: AttemptTrace, emit: Any) -> None:
    core = emit()
    (span,) = trace.spans
    for name in ("name", "attributes", "start_time", "status"):
        assert getattr(span, name) == getattr(core, name)
    assert (span.rollout_id, span.attempt_id) == ("ro-1", "at-1")
    assert (span.trace_id, span.parent_id) == (trace.trace_id, None)
    assert core.status.status_code == "OK"
    assert core.end_time == core.start_time


@pytest.mark.parametrize("emit", EMITTERS)
def test_an_emitter_that_does_not_propagate_only_returns(trace: AttemptTrace, emit: Any) -> None:
    assert isinstance(emit(propagate=False), SpanCoreFields)
    assert trace.spans == []


@pytest.mark.parametrize("emit", EMITTERS)
def test_outside_of_an_attempt_an_emitter_only_returns(emit: Any) -> None:
    assert emit().name.startswith("agentlightning.")


def test_after_the_attempt_an_emitter_changes_nothing(trace: AttemptTrace) -> None:
    trace.close()
    emit_reward(1.0)
    assert (trace.spans, trace.dropped) == ([], 1)


def test_a_state_is_named_by_any_json_value(trace: AttemptTrace) -> None:
    for key in ("room 3", {"y": 1, "x": [2]}, {"x": [2], "y": 1}, 7):
        emit_state(key)
    assert [span.attributes["raylight.state.key"] for span in trace.spans] == [
        "room 3",
        '{"x": [2], "y": 1}',
        '{"x": [2], "y": 1}',
        "7",
    ]
    assert find_final_reward(trace.spans) is None
    with pytest.raises(EmitError, match="cannot convert a key of type object to JSON"):
        emit_state(object())


# rewards


def test_a_reward_is_written_in_agent_lightnings_keys(trace: AttemptTrace) -> None:
    response = {"gen_ai.response.id": "r-1"}
    core = emit_reward({"style": 0.25, "main": 1}, primary_key="main", attributes=response)
    assert core.name == "agentlightning.annotation"
    assert core.attributes == {
        "agentlightning.reward.0.name": "main",
        "agentlightning.reward.0.value": 1.0,
        "agentlightning.reward.1.name": "style",
        "agentlightning.reward.1.value": 0.25,
        **response,
    }
    assert find_final_reward(trace.spans) == 1.0


def test_a_single_reward_is_the_primary_one() -> None:
    assert [r.name for r in get_rewards_from_span(emit_reward(True))] == ["primary"]
    assert [r.name for r in get_rewards_from_span(emit_reward({"only": 1.0}))] == ["only"]


@pytest.mark.parametrize(
    "reward", [math.nan, math.inf, "1", None, [1.0], {}, {"a": "b"}, {"a": math.nan}, {"a": 1.0, "b": 2.0}]
)
def test_what_is_no_reward_is_refused(trace: AttemptTrace, reward: Any) -> None:
    with pytest.raises(RewardError):
        emit_reward(reward)
    assert trace.spans == []


def test_several_rewards_need_a_primary_one() -> None:
    with pytest.raises(RewardError, match=r"'a', 'b'; name the one to train on with primary_key="):
        emit_reward({"a": 1.0, "b": 2.0})
    with pytest.raises(RewardError, match="not among"):
        emit_reward({"a": 1.0}, primary_key="b")


# annotations and attributes


class Colour(str, enum.Enum):  # noqa: UP042
    RED = "red"


def test_an_annotation_is_flattened() -> None:
    core = emit_annotation(
        {
            "a": {"b": 1, "c": [{"d": True}, 2]},
            "ids": [1, 2],
            "words": ("x", "y"),
            "mixed": [1, "x"],
            "colour": Colour.RED,
            "n": np.int64(3),
            "f": np.float32(0.5),
            "empty": [],
        }
    )
    assert core.attributes == {
        "a.b": 1,
        "a.c.0.d": True,
        "a.c.1": 2,
        "ids": [1, 2],
        "words": ["x", "y"],
        "mixed.0": 1,
        "mixed.1": "x",
        "colour": "red",
        "n": 3,
        "f": 0.5,
        "empty": [],
    }
    assert {type(core.attributes[key]) for key in ("colour", "n", "f")} == {str, int, float}


@pytest.mark.parametrize(
    "annotation",
    [{"a": object()}, {"a": None}, {"a": {"b": {1, 2}}}, {"a": [1, None]}, {1: "a"}, {"a": {2: 3}}, "text"],
)
def test_an_annotation_that_a_span_cannot_hold_is_refused(annotation: Any) -> None:
    with pytest.raises(EmitError):
        emit_annotation(annotation)


def test_odd_values_of_attributes_become_json() -> None:
    class Odd:
        def __str__(self) -> str:
            raise RuntimeError

    attributes = emit_message(
        "m", {"none": None, "set": {1}, "odd": Odd(), "in": {"list": [None, 1]}}
    ).attributes
    assert attributes["none"] == "null"
    assert attributes["set"] == '"{1}"'
    assert "Odd" in attributes["odd"]
    assert (attributes["in.list.0"], attributes["in.list.1"]) == ("null", 1)
    with pytest.raises(EmitError, match="must be a dict"):
        emit_message("m", [1])  # type: ignore[arg-type]


TREES = st.recursive(
    st.one_of(st.text(), st.booleans(), st.integers(), st.floats(), st.none()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(min_size=1), TREES))
def test_attributes_are_what_opentelemetry_can_hold(nested: dict[str, Any]) -> None:
    for key, value in as_attributes(nested).items():
        assert isinstance(key, str)
        items = value if isinstance(value, list) else [value]
        assert {type(item) for item in items} <= {str, bool, int, float}
        assert len({type(item) for item in items}) <= 1
    assert set(flatten(nested)) == set(as_attributes(nested))


def test_endless_nesting_ends() -> None:
    endless: dict[str, Any] = {}
    endless["a"] = endless
    (key,) = as_attributes(endless)
    assert key.count("a") <= 17


async def test_a_function_may_give_the_rewards(trace: AttemptTrace) -> None:
    @reward
    def grade(answer: str) -> float | None:
        """Grade an answer."""
        return {"right": 1.0, "wrong": 0.0}.get(answer)

    @reward
    async def grade_later(answer: str) -> Any:
        await asyncio.sleep(0)
        return answer if answer == "?" else 0.5

    assert [grade("right"), grade("unknown"), await grade_later("half")] == [1.0, None, 0.5]
    assert [get_rewards_from_span(span)[0].value for span in trace.spans] == [1.0, 0.5]
    assert grade.__doc__ == "Grade an answer."
    with pytest.raises(RewardError, match="'\\?' of type str"):
        await grade_later("?")


# messages, objects, exceptions


def test_a_message_is_read_back(trace: AttemptTrace) -> None:
    emit_message("hello", {"k": 1})
    assert trace.spans[0].name == semconv.MESSAGE
    assert get_message_value(trace.spans[0]) == "hello"
    assert get_message_value(Span.from_attributes(attributes={})) is None
    with pytest.raises(EmitError, match="int, not str"):
        get_message_value(Span.from_attributes(attributes={semconv.MESSAGE_BODY: 3}))
    with pytest.raises(EmitError, match="takes a string, not list"):
        emit_message(["hello"])  # type: ignore[arg-type]


@given(st.one_of(st.text(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.binary(), TREES))
def test_an_object_is_read_back(value: Any) -> None:
    assert repr(get_object_value(emit_object(value))) == repr(value)


def test_objects_tell_their_type() -> None:
    class Answer(BaseModel):
        text: str

    core = emit_object(Answer(text="42"))
    assert core.attributes[semconv.OBJECT_TYPE].endswith("Answer")
    assert get_object_value(core) == {"text": "42"}
    assert emit_object({"a": 1}).attributes == {semconv.OBJECT_TYPE: "dict", semconv.OBJECT_JSON: '{"a": 1}'}
    assert emit_object(True).attributes == {semconv.OBJECT_TYPE: "bool", semconv.OBJECT_LITERAL: "True"}
    assert get_object_value(Span.from_attributes(attributes={})) is None


def test_an_object_that_json_cannot_hold_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    for value in ({1, 2}, object(), endless, 10**5000, weakref.proxy(set())):
        with pytest.raises(EmitError, match=type(value).__name__):
            emit_object(value)


def test_a_number_with_more_digits_than_python_prints_is_refused() -> None:
    for value in (10**5000, [10**5000, 1]):
        with pytest.raises(EmitError, match="annotation 'a' is <builtins"):
            emit_annotation({"a": value})
    with pytest.raises(RewardError, match="must be a finite float"):
        emit_reward(10**5000)


@pytest.mark.parametrize(
    "attributes",
    [
        {semconv.OBJECT_JSON: "{"},
        {semconv.OBJECT_JSON: 3},
        {semconv.OBJECT_TYPE: "int", semconv.OBJECT_LITERAL: "x"},
        {semconv.OBJECT_TYPE: "complex", semconv.OBJECT_LITERAL: "1j"},
        {semconv.OBJECT_TYPE: "bool", semconv.OBJECT_LITERAL: "maybe"},
    ],
)
def test_an_object_that_cannot_be_read_is_an_error(attributes: dict[str, Any]) -> None:
    with pytest.raises(EmitError, match="cannot be decoded"):
        get_object_value(Span.from_attributes(attributes=attributes))


def test_an_exception_is_written_as_opentelemetry_does() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    try:
        raise ValueError("bad")
    except ValueError as error:
        core = emit_exception(error, {"step": 3})
    assert (core.attributes["exception.type"], core.attributes["exception.message"]) == ("ValueError", "bad")
    assert core.attributes["exception.escaped"] is True
    assert "test_emit.py" in core.attributes["exception.stacktrace"]
    assert core.attributes["step"] == 3
    assert "cannot be read" in emit_exception(Mute()).attributes["exception.message"]
    assert emit_exception(Mute()).attributes["exception.type"] == "Mute"
    with pytest.raises(EmitError, match="takes an exception, not 'bad'"):
        emit_exception("bad")  # type: ignore[arg-type]


# where a span hangs, and to whom it belongs


def test_the_current_span_of_opentelemetry_is_the_parent(trace: AttemptTrace) -> None:
    with TracerProvider().get_tracer("t").start_as_current_span("library") as library:
        emit_reward(1.0)
    context = library.get_span_context()
    assert trace.spans[0].parent_id == otel.format_span_id(context.span_id)
    assert trace.spans[0].trace_id == otel.format_trace_id(context.trace_id)


def test_threads_emit_to_the_attempt_whose_context_they_have() -> None:
    traces = [AttemptTrace(f"ro-{number}", "at-1") for number in range(4)]
    together = threading.Barrier(4)

    def work(number: int) -> None:
        together.wait()
        for _ in range(50):
            emit_reward(float(number))

    with ThreadPoolExecutor(4) as pool:
        waiting = []
        for number, trace in enumerate(traces):
            with tracing(trace):
                waiting.append(pool.submit(copy_context().run, work, number))
        for future in waiting:
            future.result()
    for number, trace in enumerate(traces):
        assert [span.attributes["agentlightning.reward.0.value"] for span in trace.spans] == [number] * 50


def test_emitters_are_light() -> None:
    code = (
        "import sys, raylight as a; a.emit_reward(1.0)\n"
        "from raylight.traces.context import AttemptTrace, tracing\n"
        "with tracing(AttemptTrace('r', 'a')), a.operation(name='x'): a.emit_message('m')\n"
        "heavy = {'torch', 'transformers', 'ray', 'vllm', 'verl', 'jinja2', 'opentelemetry', 'numpy'} & "
        "set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
