"""Ends of attempts: values that an agent may return, the fault of an exception, descriptions of failures."""

import collections
import re
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.trace import NonRecordingSpan, SpanContext
from unit_helpers import Unprintable, make_rollout

from raylight.errors import RewardError, SpanError
from raylight.runner.outcome import HIDDEN_FRAMES, describe, one_line, read_result
from raylight.semconv import ANNOTATION, reward_attributes
from raylight.traces.reward_spans import find_final_reward, get_rewards_from_span, named_rewards
from raylight.types import Failure, Rollout, Span, SpanCoreFields


def read(returned: Any) -> list[Span]:
    return read_result(returned, lambda: 7.0)


# numbers and named rewards


NUMBERS = [
    (1, 1.0),
    (0, 0.0),
    (-0.5, -0.5),
    (True, 1.0),
    (False, 0.0),
    (np.float32(0.5), 0.5),
    (np.int64(2), 2.0),
    (np.float64(0.25), 0.25),
    (np.bool_(True), 1.0),
    (np.array(0.5), 0.5),
    (torch.tensor(0.5), 0.5),
    (Fraction(1, 4), 0.25),
]


@pytest.mark.parametrize(("returned", "expected"), NUMBERS)
def test_a_number_becomes_a_reward_at_the_injected_time(returned: Any, expected: float) -> None:
    rewards = named_rewards(returned)
    assert (rewards, type(rewards["primary"])) == ({"primary": expected}, float)
    (span,) = read(returned)
    assert (span.name, span.start_time, span.end_time) == (ANNOTATION, 7.0, 7.0)
    assert find_final_reward([span]) == expected


def test_named_rewards_keep_their_order() -> None:
    named = named_rewards({"main": 1, "style": np.float32(0.5)})
    assert list(named.items()) == [("main", 1.0), ("style", 0.5)]
    (span,) = read(collections.OrderedDict(style=2, main=1))
    assert [(reward.name, reward.value) for reward in get_rewards_from_span(span)] == [
        ("style", 2.0),
        ("main", 1.0),
    ]


@pytest.mark.parametrize("returned", [None, [], ()])
def test_nothing_is_no_reward(returned: Any) -> None:
    assert read(returned) == []


@pytest.mark.parametrize(
    "returned",
    [
        float("nan"),
        float("inf"),
        -float("inf"),
        np.float32("nan"),
        "1.0",
        "",
        b"1",
        [1.0],
        (1.0, 2.0),
        [np.float32(1)],
        {},
        {"a": None},
        {"a": "1"},
        {"a": 1.0, "b": float("nan")},
        {"a": {"b": 1.0}},
        1j,
        object(),
        np.array([1.0, 2.0]),
        10**400,
        {1.0},
        [None],
        ["text"],
        [{"reward": 1.0}],
        [object()],
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", repr(value)),  # the same in every process
)
def test_what_is_no_reward_is_refused(returned: Any) -> None:
    with pytest.raises(RewardError):
        read(returned)


def test_a_refused_reward_is_named_with_its_type() -> None:
    with pytest.raises(RewardError, match=r"'great'.*str"):
        named_rewards("great")
    with pytest.raises(RewardError, match="'style' is nan"):
        named_rewards({"main": 1.0, "style": float("nan")})


# spans and rollouts


def test_spans_are_taken_as_they_are() -> None:
    own = Span.from_attributes(name="mine", attributes={"a": 1})
    core = SpanCoreFields(name="core", attributes=dict(reward_attributes({"r": 0.5})))
    first, second = read([own, core])
    assert first is own
    assert (second.name, find_final_reward([second])) == ("core", 0.5)
    assert [span.name for span in read((own,))] == ["mine"]


def test_spans_of_opentelemetry_are_converted() -> None:
    with TracerProvider().get_tracer("t").start_as_current_span("theirs", attributes={"n": 1}) as theirs:
        pass
    assert isinstance(theirs, ReadableSpan)
    (span,) = read([theirs])
    assert (span.name, span.attributes) == ("theirs", {"n": 1})
    assert span.span_id == f"{theirs.get_span_context().span_id:016x}"


def test_spans_and_other_things_do_not_mix() -> None:
    with pytest.raises(RewardError, match="list with a float in it"):
        read([Span.from_attributes(name="mine", attributes={}), 1.0])
    with pytest.raises(Exception, match="NonRecordingSpan"):
        read([NonRecordingSpan(SpanContext(1, 2, False))])


@pytest.mark.parametrize("wrong", [object(), {1, 2}, [b"bytes"]])
def test_a_span_that_cannot_be_stored_is_refused_now(wrong: Any) -> None:
    with pytest.raises(SpanError, match="mine"):
        read([Span.from_attributes(name="mine", attributes={"wrong": wrong})])


@pytest.mark.parametrize(
    ("reward", "expected"), [(0.5, 0.5), ({"main": 1, "style": 2}, 1.0), (None, None), ("absent", None)]
)
def test_a_rollout_has_its_reward_in_its_metadata(reward: Any, expected: float | None) -> None:
    rollout = make_rollout(metadata={"other": 1} if reward == "absent" else {"reward": reward})
    assert find_final_reward(read(rollout)) == expected


def test_a_rollout_in_a_rollout_is_none() -> None:
    inner: Rollout = make_rollout()
    with pytest.raises(RewardError, match="Rollout"):
        read(make_rollout(metadata={"reward": inner}))


# the description


def test_a_message_is_one_line_with_the_type() -> None:
    assert describe(ValueError("first\n  second")).error == "ValueError: first second"
    assert describe(ValueError()).error == "ValueError:"


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:
        return caught


def test_an_exception_that_cannot_be_printed_is_described() -> None:
    failure = describe(raised(Unprintable()))
    assert failure.error == "Unprintable: (its message cannot be read: RuntimeError)"
    assert "raise error" in failure.trace


def test_the_trace_ends_with_the_exception_and_has_no_frame_of_raylight() -> None:
    failure = describe(raised(KeyError("tool")))
    assert failure.trace.rstrip().endswith("KeyError: 'tool'")
    assert not any(frame in failure.trace for frame in HIDDEN_FRAMES)
    assert describe(KeyError("never raised")).trace == ""


def test_notes_replace_a_traceback_without_frames_of_the_agent() -> None:
    error = KeyError("never raised")
    error.add_note("standard error:\nTraceback of another process")
    assert describe(error).trace == "standard error:\nTraceback of another process"


@given(st.text(st.characters(categories=None), max_size=30))
def test_a_failure_can_be_stored_whatever_characters_its_message_has(text: str) -> None:
    """Lone surrogates occur in file names that are not UTF-8, and in some models' answers."""
    failure = describe(raised(FileNotFoundError(text)))
    assert Failure.model_validate_json(failure.model_dump_json()) == failure
    assert "\n" not in one_line(text)
