"""The trace of an attempt: spans from any thread, each taken once, with a count of the dropped ones."""

import contextlib
import math
import re
import threading
from typing import Any

import pytest

from raylight.errors import RewardError
from raylight.traces.context import MAX_REWARD_TEXT, AttemptTrace, current_trace, tracing
from raylight.traces.reward_spans import get_reward_value
from raylight.types import Span


def a_span(name: str = "s") -> Span:
    return Span.from_attributes(name=name, attributes={})


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


def test_spans_are_keyed_and_given_away_once_in_their_order() -> None:
    trace, given = AttemptTrace("ro-1", "at-1"), a_span("one")
    trace.add(given)
    trace.add(a_span("two"))
    assert names(trace.take()) == ["one", "two"]
    assert trace.take() == []
    trace.add(a_span("three"))
    assert names(trace.take()) == ["three"]
    assert names(trace.spans) == ["one", "two", "three"]
    assert {(span.rollout_id, span.attempt_id) for span in trace.spans} == {("ro-1", "at-1")}
    assert given.rollout_id == ""


def test_what_does_not_fit_is_counted() -> None:
    trace = AttemptTrace("ro-1", "at-1", max_spans=2)
    for name in ("one", "two", "three", "four"):
        trace.add(a_span(name))
    assert (names(trace.take()), trace.dropped) == (["one", "two"], 2)
    trace.add(a_span("five"))  # what was taken still counts: an attempt without end has no more room
    assert trace.dropped == 3


def reward_span(value: Any = 1.0, **attributes: Any) -> Span:
    rewards = {"agentlightning.reward.0.name": "primary", "agentlightning.reward.0.value": value}
    return Span.from_attributes(name="agentlightning.annotation", attributes=rewards | attributes)


def test_rewards_have_room_of_their_own() -> None:
    trace = AttemptTrace("ro-1", "at-1", max_spans=1, max_rewards=2)
    for span in (a_span("one"), a_span("two"), reward_span(0.25), a_span("three"), reward_span(0.5)):
        trace.add(span)
    assert [get_reward_value(span) for span in trace.spans] == [None, 0.25, 0.5]
    assert (trace.losses, trace.reward_error) == ({"spans_dropped": 2}, None)


@pytest.mark.parametrize(
    ("span", "kept", "reason"),
    [
        (reward_span(1.0), 1, "at most 10000 spans with a reward"),
        (reward_span(1.0, note="x" * MAX_REWARD_TEXT), 1, "characters"),
        (reward_span(math.nan), 2, "must be a finite float"),
        (reward_span(1e308), 2, "1e\\+308"),
        (reward_span("high"), 2, "'high' of type str"),
    ],
    ids=["too many", "too long", "nan", "too large", "text"],
)
def test_a_reward_that_is_lost_is_an_error_of_the_attempt(span: Span, kept: int, reason: str) -> None:
    trace = AttemptTrace("ro-1", "at-1", max_rewards=1)
    trace.add(reward_span(0.5))
    trace.add(span)
    assert (len(trace.spans), trace.lost_rewards) == (kept, 1)
    assert isinstance(trace.reward_error, RewardError)
    assert re.search(reason, str(trace.reward_error))


def test_a_reward_after_the_end_is_only_counted() -> None:
    trace = AttemptTrace("ro-1", "at-1")
    trace.close()
    trace.add(reward_span())
    assert (trace.losses, trace.reward_error) == ({"spans_dropped": 1}, None)


def test_long_attributes_have_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raylight.traces.context.MAX_TEXT", 1000)
    trace = AttemptTrace("ro-1", "at-1")
    for _ in range(3):
        trace.add(Span.from_attributes(name="s", attributes={"text": "x" * 300, "list": ["y" * 100]}))
    assert (len(trace.spans), trace.dropped) == (2, 1)


def test_spans_are_taken_in_parts() -> None:
    trace = AttemptTrace("ro-1", "at-1")
    for number in range(5):
        trace.add(a_span(str(number)))
    assert [names(trace.take(2)) for _ in range(4)] == [["0", "1"], ["2", "3"], ["4"], []]


def test_what_was_not_taken_before_the_end_can_be_taken_after_it() -> None:
    trace = AttemptTrace("ro-1", "at-1")
    trace.add(a_span("one"))
    trace.close()
    trace.add(a_span("late"))
    assert (names(trace.take()), trace.dropped) == (["one"], 1)


def test_threads_lose_nothing_and_nothing_comes_twice() -> None:
    trace, start = AttemptTrace("ro-1", "at-1"), threading.Barrier(5)
    taken: list[Span] = []

    def add(number: int) -> None:
        start.wait()
        for n in range(300):
            trace.add(a_span(f"{number}-{n}"))

    threads = [threading.Thread(target=add, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    start.wait()
    while any(thread.is_alive() for thread in threads):
        taken += trace.take()
    taken += trace.take()
    assert len(names(taken)) == len(set(names(taken))) == 1200
    for number in range(4):
        assert [name for name in names(taken) if name.startswith(f"{number}-")] == [
            f"{number}-{n}" for n in range(300)
        ]


@pytest.mark.timeout(10)
def test_a_span_that_ends_while_another_is_added_does_not_lock_up() -> None:
    """Garbage collection may happen at any point, and may end a span."""
    trace = AttemptTrace("ro-1", "at-1")

    class Collecting(Span):
        def model_copy(self, **how: Any) -> Any:
            trace.add(a_span("inner"))
            return super().model_copy(**how)

    trace.add(Collecting(name="outer", trace_id="t", span_id="s"))
    assert sorted(names(trace.spans)) == ["inner", "outer"]


def test_the_current_trace_is_that_of_the_innermost_block() -> None:
    outer, inner = AttemptTrace("ro-1", "at-1"), AttemptTrace("ro-2", "at-1")
    assert current_trace() is None
    with tracing(outer):
        with contextlib.suppress(KeyError), tracing(inner):
            assert current_trace() is inner
            raise KeyError
        assert current_trace() is outer
    assert current_trace() is None
