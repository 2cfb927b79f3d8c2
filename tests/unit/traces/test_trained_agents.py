"""Selection of the agents to train on, by a pattern and by the rollout's marks."""

import dataclasses
from typing import Any

import pytest
from unit_helpers import make_finished, make_generation, make_key

from raylight.errors import ConfigError
from raylight.traces.trained_agents import AgentFilter, agents_of_generations, filter_generations
from raylight.types import FinishedRollout, Generation, Span


def call(call_id: str, agent: str | None = None) -> Generation:
    return dataclasses.replace(make_generation([1], [2], key=make_key(call_id=call_id)), agent=agent)


def span(span_id: str, parent: str | None, times: tuple[float, float], **attributes: Any) -> Span:
    dotted = {key.replace("__", "."): value for key, value in attributes.items()}
    return Span(
        trace_id="t",
        span_id=span_id,
        parent_id=parent,
        name="x",
        attributes=dotted,
        start_time=times[0],
        end_time=times[1],
    )


def finished(
    generations: list[Generation], spans: list[Span] | None = None, marked: tuple[str, ...] = ()
) -> FinishedRollout:
    base = make_finished(1.0, calls=0)
    for agent in marked:
        base.rollout.mark_agent_as_trainable(agent)
    return dataclasses.replace(base, generations=generations, spans=spans or [])


@pytest.mark.parametrize(
    ("pattern", "marked", "kept"),
    [
        (None, (), ["writer", "co-writer", "critic", None]),
        ("writer", (), ["writer", "co-writer"]),
        ("^writer$", (), ["writer"]),
        (None, ("critic",), ["critic"]),
        (None, ("crit",), []),  # a mark is a name, not a pattern
        ("^writer", ("critic",), ["writer", "critic"]),
        ("", (), ["writer", "co-writer", "critic"]),
    ],
)
def test_what_is_kept(pattern: str | None, marked: tuple[str, ...], kept: list[str | None]) -> None:
    agents = AgentFilter(pattern, marked)
    assert [name for name in ["writer", "co-writer", "critic", None] if agents.keeps(name)] == kept
    assert agents.keeps_all == (pattern is None and not marked)


def test_a_pattern_that_is_none_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"'\('.*not a regular expression"):
        AgentFilter("(")


SPANS = [
    span("root", None, (0, 20)),
    span("w", "root", (1, 5), gen_ai__agent__name="writer"),
    span("c", "root", (6, 9), agent__name="critic"),
    span("1", "w", (2, 3), gen_ai__response__id="chatcmpl-one"),
    span("2", "c", (7, 8), gen_ai__response__id="msg_two"),
    span(
        "3", None, (7.2, 7.8), gen_ai__response__id="resp_three"
    ),  # captured at the engine: found by its times
]


def test_the_agent_of_a_call_is_its_own_or_that_of_the_span_with_its_response() -> None:
    calls = [call("one"), call("two"), call("three"), call("four"), call("one", agent="editor")]
    assert agents_of_generations(calls, SPANS) == ["writer", "critic", "critic", None, "editor"]


def test_without_spans_only_the_calls_that_name_their_agent_have_one() -> None:
    assert agents_of_generations([call("one"), call("two", agent="editor")], []) == [None, "editor"]
    assert agents_of_generations([], []) == []


def test_an_id_that_is_the_beginning_of_another_is_told_apart() -> None:
    spans = [
        span("b", None, (0, 1), gen_ai__agent__name="tenth", gen_ai__response__id="chatcmpl-call-10"),
        span("a", None, (2, 3), gen_ai__agent__name="first", gen_ai__response__id="chatcmpl-call-1"),
    ]
    assert agents_of_generations([call("call-1"), call("call-10")], spans) == ["first", "tenth"]


def test_a_span_below_its_agent_knows_better_than_one_that_was_found_by_its_times() -> None:
    spans = [
        span("root", None, (0, 20)),
        span("w", "root", (1, 9), gen_ai__agent__name="writer"),
        span("c", "root", (6, 8), gen_ai__agent__name="critic"),  # at the same time
        span("captured", None, (6.5, 7), gen_ai__response__id="chatcmpl-one"),
        span("client", "w", (6.4, 7.1), gen_ai__response__id="chatcmpl-one"),
    ]
    assert agents_of_generations([call("one")], spans) == ["writer"]


def test_a_span_that_names_its_agent_knows_best() -> None:
    spans = [
        span("w", None, (1, 9), gen_ai__agent__name="writer"),
        span("client", "w", (6.4, 7.1), gen_ai__response__id="chatcmpl-one"),
        span("captured", None, (6.5, 7), gen_ai__response__id="chatcmpl-one", gen_ai__agent__name="editor"),
    ]
    assert agents_of_generations([call("one")], spans) == ["editor"]


def test_the_generations_of_a_rollout_are_filtered() -> None:
    calls = [call("one"), call("two"), call("four")]
    assert filter_generations(finished(calls, SPANS)) == calls
    assert filter_generations(finished(calls, SPANS), "writ") == calls[:1]
    assert filter_generations(finished(calls, SPANS, marked=("critic",))) == calls[1:2]
    assert filter_generations(finished(calls, SPANS, marked=("critic",)), "writ") == calls[:2]
    assert filter_generations(finished(calls), "writ") == []


def test_every_choice_of_a_response_has_the_agent_of_the_response() -> None:
    spans = [
        span("w", None, (0, 9), gen_ai__agent__name="writer"),
        span("client", "w", (1, 4), gen_ai__response__id="chatcmpl-abc"),
        span("abc", None, (2, 3), gen_ai__response__id="chatcmpl-abc", raylight__call_id="abc"),
        span("def", None, (2, 3), gen_ai__response__id="chatcmpl-abc", raylight__call_id="def"),
    ]
    assert agents_of_generations([call("abc"), call("def"), call("ghi")], spans) == ["writer", "writer", None]
