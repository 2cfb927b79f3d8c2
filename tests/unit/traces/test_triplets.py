"""Conversion of spans to triplets: one per call with its agent and reward, from every tracing library."""

import inspect
import itertools
import json
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_helpers import make_image
from store_helpers import open_box
from template_helpers import says, user

from raylight.errors import ConfigError
from raylight.images.messages import recorded_url
from raylight.semconv import ANNOTATION, VIRTUAL, reward_attributes
from raylight.traces.span_tree import SpanTree
from raylight.traces.triplets import (
    LlmProxyTraceToTriplet,
    RewardMatchPolicy,
    TracerTraceToTriplet,
    TraceToTriplet,
    match_rewards,
    read_triplet,
)
from raylight.types import Span, Triplet

_sequence = itertools.count(1)
IMAGE = {"type": "image_url", "image_url": {"url": "file:///a.png"}}


def span(
    name: str, span_id: str, parent: str | None = None, times: tuple[float, float] = (0, 1), **attributes: Any
) -> Span:
    dotted = {key.replace("__", "."): value for key, value in attributes.items()}
    return Span(
        rollout_id="ro-1",
        attempt_id="at-1",
        sequence_id=next(_sequence),
        trace_id="t",
        span_id=span_id,
        parent_id=parent,
        name=name,
        attributes=dotted,
        start_time=times[0],
        end_time=times[1],
    )


def reward_task(span_id: str, times: tuple[float, float], value: float, parent: str | None = None) -> Span:
    """Return AgentOps' span of a function that computes a reward."""
    output = json.dumps({"type": "reward", "value": value})
    return span("grade.task", span_id, parent, times, agentops__task__output=output)


def named(span_id: str, times: tuple[float, float], agent: str, parent: str | None = None) -> Span:
    """Return the span of a named agent."""
    return span(agent, span_id, parent, times, agent__name=agent)


def captured(
    response: str, prompt: list[int], output: list[int], times: tuple[float, float], parent: str | None = None
) -> Span:
    """Return the span of a call that raylight captured at the engine."""
    return span(
        "openai.chat.completion",
        f"call-{response}",
        parent,
        times,
        gen_ai__request__model="policy",
        gen_ai__response__id=response,
        gen_ai__input__messages=json.dumps([user("2+2?")]),
        gen_ai__output__messages=json.dumps([says("4")]),
        prompt_token_ids=prompt,
        response_token_ids=output,
        response_logprobs=[-0.5] * len(output),
        weight_versions=[3] * len(output),
    )


def reward(value: float, at: float, parent: str | None = None) -> Span:
    made = span(ANNOTATION, f"reward-{next(_sequence)}", parent, (at, at))
    return made.model_copy(update={"attributes": reward_attributes({"primary": value})})


def rewards_of(triplets: list[Triplet]) -> dict[str, float | None]:
    return {triplet.metadata["response_id"]: triplet.reward for triplet in triplets}


def test_a_captured_call_is_a_triplet_with_tokens_logprobs_and_versions() -> None:
    (triplet,) = TraceToTriplet().adapt([captured("r1", [1, 2], [3, 4], (0, 1)), reward(0.5, 2)])
    assert triplet.prompt == {"token_ids": [1, 2], "raw_content": [user("2+2?")], "image_urls": []}
    sampled = {"logprobs": [-0.5, -0.5], "weight_versions": [3, 3]}
    assert triplet.response == {"token_ids": [3, 4], "raw_content": [says("4")], **sampled}
    assert triplet.reward == 0.5
    assert triplet.metadata == {
        "response_id": "r1",
        "agent_name": None,
        "request": {"model": "policy"},
        "response": {"id": "r1"},
    }


def test_no_spans_are_no_triplets() -> None:
    assert TracerTraceToTriplet().adapt([]) == []
    assert LlmProxyTraceToTriplet()([]) == []


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        ("openai.chat.completion", True),
        ("openai.completion", True),
        ("openai.response", True),
        ("anthropic.message", True),
        ("raw_gen_ai_request", True),
        ("openai.chat", True),
        ("anthropic.chat", True),
        ("openai.embeddings", False),
        ("litellm_request", False),
        ("my openai.chat.completion", False),
    ],
)
def test_which_spans_are_calls_by_default(name: str, matches: bool) -> None:
    assert bool(TracerTraceToTriplet().adapt([span(name, "a")])) == matches


def test_log_probs_that_do_not_fit_the_tokens_are_left_out_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spoilt = captured("r1", [1], [2, 3], (0, 1))
    spoilt.attributes["response_logprobs"] = [-0.5]
    (triplet,) = TraceToTriplet().adapt([spoilt])
    assert "logprobs" not in triplet.response
    assert "weight_versions" in triplet.response
    assert "2 tokens but 1 logprobs" in caplog.text


# spans as other libraries write them


def agentops_call(span_id: str, parent: str, times: tuple[float, float], response: str) -> Span:
    image = [{"type": "text", "text": "How many?"}, IMAGE]
    content = [{"token": "3", "logprob": -0.25, "top_logprobs": []}, {"token": "", "logprob": -0.125}]
    attributes = {
        "gen_ai.request.type": "chat",
        "gen_ai.system": "OpenAI",
        "gen_ai.request.model": "Qwen/Qwen2-VL-2B-Instruct",
        "gen_ai.request.temperature": 0.0,
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": json.dumps(image),
        "gen_ai.prompt.prompt_filter_results": "[]",
        "gen_ai.response.id": response,
        "gen_ai.response.model": "qwen",
        "gen_ai.completion.0.content": "3",
        "gen_ai.completion.0.finish_reason": "stop",
        "gen_ai.completion.0.role": "assistant",
        "prompt_token_ids": (151644, 8948),
        "response_token_ids": (18, 151645),
        "logprobs.content": json.dumps(content),
    }
    made = span("openai.chat.completion", span_id, parent, times)
    return made.model_copy(update={"attributes": attributes})


def test_agentops_spans() -> None:
    spans = [
        span("run.session", "s", None, (0, 10)),
        span("planner.agent", "a", "s", (1, 9), agentops__span__kind="agent", operation__name="planner"),
        agentops_call("c", "a", (2, 3), "chatcmpl-1"),
        reward_task("g", (4, 5), 0.7, "a"),
    ]
    (triplet,) = TracerTraceToTriplet(agent_match="plan").adapt(spans)
    assert triplet.prompt["token_ids"] == [151644, 8948]
    assert triplet.prompt["image_urls"] == ["file:///a.png"]
    assert triplet.response["token_ids"] == [18, 151645]
    assert triplet.response["logprobs"] == [-0.25, -0.125]
    assert triplet.response["raw_content"] == [{"role": "assistant", "content": "3", "finish_reason": "stop"}]
    assert (triplet.reward, triplet.metadata["agent_name"]) == (0.7, "planner")
    model = "Qwen/Qwen2-VL-2B-Instruct"
    assert triplet.metadata["request"] == {"type": "chat", "model": model, "temperature": 0.0}


def test_agent_framework_names_the_agent_of_a_call_that_the_engine_captured() -> None:
    """The client's span has the response id; the engine's has the tokens, no parent, and another clock."""
    spans = [
        span("workflow.run", "w", None, (0, 10)),
        span("executor.process writer", "e", "w", (1, 4), executor__id="writer"),
        span("invoke_agent Writer", "i", "e", (1, 4), gen_ai__agent__name="Writer"),
        span("chat policy", "c", "i", (2, 3), gen_ai__response__id="chatcmpl-1"),
        span("executor.process critic", "f", "w", (5, 8), executor__id="critic"),
        captured("chatcmpl-1", [1], [2], (6.1, 6.9)),
    ]
    adapter = TracerTraceToTriplet(llm_call_match=r"openai\.chat\.completion", repair_hierarchy=False)
    (triplet,) = adapter.adapt(spans)
    assert triplet.metadata["agent_name"] == "writer"  # the executor's name comes before the agent's
    assert triplet.response["token_ids"] == [2]


def test_openllmetry_and_capture_tell_of_one_call() -> None:
    """The span of opentelemetry-instrumentation-openai has agent and messages, the engine's has tokens."""
    spans = [
        span("writer.agent", "a", None, (0, 9), gen_ai__agent__name="writer"),
        span(
            "openai.chat",
            "o",
            "a",
            (1, 4),
            gen_ai__system="OpenAI",
            llm__request__type="chat",
            gen_ai__request__model="policy",
            gen_ai__response__id="r1",
            gen_ai__prompt__0__role="user",
            gen_ai__prompt__0__content="Hello",
            gen_ai__completion__0__content="Hi",
            gen_ai__completion__0__role="assistant",
        ),
        captured("r1", [1], [2], (2, 3)),
        reward(1.0, 3.5, "a"),
    ]
    (triplet,) = TracerTraceToTriplet(agent_match="writer").adapt(spans)
    assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) == ([1], [2])
    assert triplet.metadata["agent_name"] == "writer"
    assert triplet.reward == 1.0  # given between the end of the call and the end of the client's span


def test_a_span_without_response_id_around_a_call_is_the_same_call() -> None:
    spans = [
        span("openai.chat", "o", None, (0, 4)),
        captured("r1", [1], [2], (1, 3)),
        span("openai.chat", "inner", "call-r1", (1, 2)),
    ]
    assert [triplet.metadata["response_id"] for triplet in TracerTraceToTriplet().adapt(spans)] == ["r1"]


def proxy_call(
    response: str, prompt: list[int], output: list[int], sequence: int, newer: bool = False
) -> Span:
    """Return a span of agent-lightning's LLM proxy, with the raw response in Python's notation."""
    choice: dict[str, Any] = {"index": 0, "message": {"role": "assistant", "content": None, "tool_calls": []}}
    attributes: dict[str, Any] = {
        "llm.hosted_vllm.messages": str([{"role": "user", "content": "it's 2+2?"}]),
        "llm.hosted_vllm.prompt_token_ids": str(prompt),
        "llm.hosted_vllm.choices": str([choice | {"token_ids": output}] if newer else [choice]),
        "llm.hosted_vllm.id": response,
    }
    if not newer:
        attributes["llm.hosted_vllm.response_token_ids"] = str([output])
    made = span("raw_gen_ai_request", f"raw-{sequence}", None, (sequence, sequence + 1))
    return made.model_copy(update={"attributes": attributes, "sequence_id": sequence})


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("adapter", [TracerTraceToTriplet(), LlmProxyTraceToTriplet()])
def test_proxy_spans(newer: bool, adapter: Any) -> None:
    (triplet,) = adapter([proxy_call("chatcmpl-A", [1, 2], [3], 1, newer)])
    assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) == ([1, 2], [3])
    assert triplet.prompt["raw_content"] == [{"role": "user", "content": "it's 2+2?"}]
    assert triplet.metadata["response_id"] == "chatcmpl-A"


def test_weave_spans() -> None:
    inputs, outputs = "agentlightning.operation.input", "agentlightning.operation.output"
    call = span("openai.chat.completions.create", "c", "a", (1, 2))
    call.attributes.update(
        {
            f"{inputs}.model": "policy",
            f"{inputs}.messages.0.role": "user",
            f"{inputs}.messages.0.content": "Hello",
            f"{outputs}.id": "chatcmpl-9",
            f"{outputs}.prompt_token_ids": [1, 2],
            f"{outputs}.choices.0.token_ids": [3],
            f"{outputs}.choices.0.message.role": "assistant",
            f"{outputs}.choices.0.message.content": "Hi",
        }
    )
    agent = span("run", "a", None, (0, 3), type="agent", agentlightning__operation__input__name="helper")
    (triplet,) = TracerTraceToTriplet().adapt([agent, call])
    assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) == ([1, 2], [3])
    assert triplet.prompt["raw_content"] == [{"role": "user", "content": "Hello"}]
    assert triplet.response["raw_content"] == [{"token_ids": [3], "message": says("Hi")}]
    assert triplet.metadata["agent_name"] == "helper"
    assert triplet.metadata["request"] == {"model": "policy"}


# agents


@pytest.mark.parametrize(
    ("name", "attributes", "agent"),
    [
        ("x", {"gen_ai.agent.name": "writer"}, "writer"),
        ("x", {"agent.name": "writer"}, "writer"),
        ("x", {"agentops.span.kind": "agent", "operation.name": "writer"}, "writer"),
        ("x", {"recipient_agent_type": "writer"}, "writer"),
        ("x", {"langchain.chain.type": "writer"}, "writer"),
        ("x", {"executor.id": "writer"}, "writer"),
        ("x", {"type": "agent", "agentlightning.operation.input.name": "writer"}, "writer"),
        ("langchain.Chain.LangGraph", {"lc_name": "writer"}, "writer"),
        ("x", {"operation.name": "x"}, None),
        ("x", {"agent.name": ""}, None),
        ("x", {"agent.name": 3}, None),
        ("x", {"lc_name": "x"}, None),
    ],
)
def test_conventions_of_agent_names(name: str, attributes: dict[str, Any], agent: str | None) -> None:
    outer = span(name, "a", None, (0, 9)).model_copy(update={"attributes": attributes})
    (triplet,) = TracerTraceToTriplet().adapt([outer, captured("r", [1], [2], (1, 2), "a")])
    assert triplet.metadata["agent_name"] == agent


def test_the_nearest_agent_decides_and_unnamed_calls_are_left_out_by_a_filter() -> None:
    spans = [
        named("p", (0, 10), "planner"),
        named("h", (1, 5), "helper", "p"),
        captured("inner", [1], [2], (2, 3), "h"),
        captured("outer", [3], [4], (6, 7), "p"),
        captured("stray", [5], [6], (20, 21)),
    ]
    agents = [triplet.metadata["agent_name"] for triplet in TracerTraceToTriplet().adapt(spans)]
    assert agents == ["helper", "planner", None]
    assert list(rewards_of(TracerTraceToTriplet(agent_match="^planner$").adapt(spans))) == ["outer"]
    assert list(rewards_of(TracerTraceToTriplet(agent_match="p").adapt(spans))) == ["inner", "outer"]


def test_repair_gives_a_floating_call_its_agent() -> None:
    spans = [
        span("session", "s", None, (0, 10)),
        span("agent", "a", "s", (1, 9), agent__name="planner"),
        captured("r", [1], [2], (2, 3), "s"),
        reward(0.3, 4, "a"),
    ]
    (triplet,) = TracerTraceToTriplet(agent_match="planner").adapt(spans)
    assert (triplet.metadata["agent_name"], triplet.reward) == ("planner", 0.3)
    assert TracerTraceToTriplet(agent_match="planner", repair_hierarchy=False).adapt(spans) == []


# rewards


def test_a_reward_goes_to_the_last_call_that_had_ended() -> None:
    spans = [
        captured("a", [1], [2], (0, 1)),
        captured("b", [1], [2], (2, 3)),
        captured("c", [1], [2], (4, 9)),
        reward(0.5, 5),
    ]
    assert rewards_of(TraceToTriplet().adapt(spans)) == {"a": None, "b": 0.5, "c": None}


def test_later_rewards_go_to_earlier_calls_that_have_none() -> None:
    spans = [
        captured("a", [1], [2], (0, 1)),
        captured("b", [1], [2], (2, 3)),
        reward(0.5, 4),
        reward(0.25, 5),
        reward(0.1, 6),
    ]
    assert rewards_of(TraceToTriplet().adapt(spans)) == {"a": 0.25, "b": 0.5}


def test_a_sibling_reward_stays_below_its_parent() -> None:
    spans = [
        span("root", "r", None, (0, 20)),
        span("one", "1", "r", (0, 10)),
        captured("a", [1], [2], (1, 2), "1"),
        reward(0.1, 6, "1"),
        span("two", "2", "r", (0, 10)),
        captured("b", [1], [2], (3, 4), "2"),
        reward(0.2, 5, "2"),
    ]
    assert rewards_of(TraceToTriplet(reward_match="first_sibling").adapt(spans)) == {"a": 0.1, "b": 0.2}
    assert rewards_of(TraceToTriplet(reward_match="first_occurrence").adapt(spans)) == {"a": 0.1, "b": 0.2}
    crossed = [*spans[:3], reward(0.1, 4.5, "1"), *spans[4:]]
    siblings = TraceToTriplet(reward_match=RewardMatchPolicy.FIRST_SIBLING)
    assert rewards_of(siblings.adapt(crossed)) == {"a": 0.1, "b": 0.2}
    assert rewards_of(TraceToTriplet().adapt(crossed)) == {"a": 0.2, "b": 0.1}


def test_agent_lightnings_enum_names_a_reward_matching() -> None:
    class Foreign(str, Enum):  # noqa: UP042 - as agent-lightning has it
        FIRST_SIBLING = "first_sibling"

    assert TraceToTriplet(reward_match=Foreign.FIRST_SIBLING).reward_match == RewardMatchPolicy.FIRST_SIBLING


@pytest.mark.parametrize("judge_parent", ["grade", None])
def test_the_calls_of_a_judge_are_left_out(judge_parent: str | None) -> None:
    """The same holds if only the judge's client span is within the reward, and the engine's clock is off."""
    spans = [
        captured("a", [1], [2], (0, 1)),
        reward_task("grade", (2, 5), 0.5),
        span("openai.chat", "client", "grade", (3, 4), gen_ai__response__id="judge"),
        captured("judge", [1], [2], (3.1, 3.9) if judge_parent else (30, 31), judge_parent),
    ]
    assert rewards_of(TraceToTriplet().adapt(spans)) == {"a": 0.5}
    assert set(rewards_of(TraceToTriplet(exclude_llm_call_in_reward=False).adapt(spans))) == {"a", "judge"}


def test_the_calls_in_an_operation_that_computes_a_reward_are_left_out() -> None:
    grade = span(
        "agentlightning.operation", "g", None, (2, 5), agentlightning__operation__name="agentlightning.reward"
    )
    spans = [captured("a", [1], [2], (0, 1)), grade, captured("judge", [1], [2], (3, 4), "g")]
    assert list(rewards_of(TraceToTriplet().adapt(spans))) == ["a"]


def test_calls_without_tokens_may_be_skipped_and_then_get_no_reward() -> None:
    spans = [
        captured("a", [1], [2], (0, 1)),
        span("openai.chat", "e", None, (2, 3), gen_ai__response__id="e"),
        reward(0.5, 4),
    ]
    assert rewards_of(TraceToTriplet().adapt(spans)) == {"a": None, "e": 0.5}
    assert rewards_of(TraceToTriplet(_skip_empty_token_spans=True).adapt(spans)) == {"a": 0.5}


def test_of_spans_with_one_response_id_the_first_one_counts() -> None:
    spans = [captured("r", [1, 2], [3, 4], (2, 3)), captured("r", [9], [8], (3.2, 3.8))]
    spans[1] = spans[1].model_copy(update={"span_id": "again"})
    (triplet,) = TraceToTriplet().adapt(spans)
    assert (triplet.prompt["token_ids"], triplet.response["token_ids"]) == ([1, 2], [3, 4])


@pytest.mark.parametrize(
    "arguments", [{"reward_match": "last"}, {"llm_call_match": "("}, {"agent_match": "("}]
)
def test_wrong_arguments_are_errors_at_once(arguments: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        TracerTraceToTriplet(**arguments)  # type: ignore[arg-type]


# by sequence


def numbered(made: Span, sequence: int) -> Span:
    # clocks that disagree
    return made.model_copy(update={"sequence_id": sequence, "start_time": 100.0 - sequence})


def test_rewards_by_sequence() -> None:
    spans = [
        numbered(reward(9.0, 0), 1),
        numbered(captured("a", [1], [2], (0, 1)), 2),
        numbered(captured("b", [1], [2], (0, 1)), 4),
        numbered(reward(0.1, 0), 5),
        numbered(captured("c", [1], [2], (0, 1)), 6),
        numbered(reward(8.0, 0), 6),
        numbered(reward(0.3, 0), 8),
    ]
    triplets = LlmProxyTraceToTriplet().adapt(list(reversed(spans)))
    assert [triplet.metadata["response_id"] for triplet in triplets] == ["a", "b", "c"]
    assert rewards_of(triplets) == {"a": 8.0, "b": 0.1, "c": 0.3}


def test_by_sequence_a_response_counts_once_and_only_with_tokens() -> None:
    spans = [
        proxy_call("x", [1], [2], 1),
        proxy_call("x", [3], [4], 2),
        numbered(span("litellm_request", "l", gen_ai__response__id="y"), 3),
        numbered(reward(0.5, 0), 4),
    ]
    (triplet,) = LlmProxyTraceToTriplet().adapt(spans)
    assert (triplet.prompt["token_ids"], triplet.reward) == ([1], 0.5)


TIMES = st.lists(
    st.tuples(st.integers(0, 20), st.integers(0, 5)).map(lambda t: (float(t[0]), float(t[0] + t[1]))),
    max_size=8,
)


@given(TIMES, st.lists(st.integers(0, 25).map(float), max_size=8))
def test_a_reward_goes_to_at_most_one_call_that_had_ended_and_none_is_wasted(
    calls: list[tuple[float, float]], times: list[float]
) -> None:
    calls, times = sorted(calls), sorted(times)
    given_to = match_rewards(calls, [(time, float(index)) for index, time in enumerate(times)])
    assert len(set(given_to.values())) == len(given_to)
    for place, index in given_to.items():
        assert calls[place][1] <= times[int(index)]
    for index, time in enumerate(times):
        if float(index) not in given_to.values():
            free = [c for place, c in enumerate(calls) if place not in given_to or given_to[place] > index]
            assert all(end > time for _, end in free)


# the tree

IDS = st.sampled_from(["a", "b", "c", "d", "e"])
SPANS = st.lists(
    st.tuples(IDS, st.none() | IDS | st.just("gone"), st.integers(0, 5), st.integers(0, 5)), max_size=8
)


@given(SPANS)
def test_any_spans_make_a_tree_that_holds_each_id_once(drawn: list[tuple[str, str | None, int, int]]) -> None:
    """Missing parents, several roots, doubled ids and circles are allowed; repairing keeps each span once."""
    spans = [
        span("openai.chat.completion", i, parent, (start, start + length))
        for i, parent, start, length in drawn
    ]
    tree = SpanTree.from_spans(spans)
    for repair in (False, True):
        if repair:
            tree.repair_hierarchy()
        nodes = list(tree.walk())
        assert sorted(n.span.span_id for n in nodes if not n.virtual) == sorted({s.span_id for s in spans})
        assert all(child.parent is node for node in nodes for child in node.children)
        assert len(tree.render().splitlines()) == len(nodes)
    TracerTraceToTriplet().adapt(spans)


def test_a_missing_parent_is_virtual_and_keeps_its_children_together() -> None:
    tree = SpanTree.from_spans([span("x", "a", "ghost"), span("y", "b", "ghost")])
    assert (tree.root.span.span_id, tree.root.span.name, tree.root.virtual) == ("ghost", VIRTUAL, True)
    assert [child.span.span_id for child in tree.root.children] == ["a", "b"]


def test_several_roots_get_a_virtual_one() -> None:
    tree = SpanTree.from_spans([span("y", "b", None, (5, 6)), span("x", "a", None, (0, 1))])
    assert tree.root.virtual
    assert [child.span.span_id for child in tree.root.children] == ["a", "b"]
    assert tree.find("b") is tree.root.children[1]
    assert tree.find("c") is None


def test_a_very_deep_trace_is_no_problem() -> None:
    spans = [span("x", str(i), str(i - 1) if i else None, (i, 10_000 - i)) for i in range(3000)]
    spans.append(captured("r", [1], [2], (4000, 4001), "2999"))
    assert len(TracerTraceToTriplet().adapt(spans)) == 1


def test_repair_moves_to_the_tightest_span_and_never_below_itself() -> None:
    spans = [
        span("root", "r", None, (0, 10)),
        span("wide", "w", "r", (1, 9)),
        span("narrow", "n", "r", (2, 8)),
        span("late", "l", "n", (1.5, 8.5)),
        span("call", "c", "r", (3, 4)),
    ]
    tree = SpanTree.from_spans(spans)
    tree.repair_hierarchy()
    parents = {node.span.span_id: node.parent.span.span_id for node in tree.walk() if node.parent}
    assert parents == {"w": "r", "n": "w", "l": "n", "c": "n"}


def test_spans_without_times_stay_and_rewards_go_by_order() -> None:
    untimed = [captured("a", [1], [2], (0, 0)), captured("b", [1], [2], (0, 0)), reward(0.5, 0)]
    untimed = [made.model_copy(update={"start_time": None, "end_time": None}) for made in untimed]
    assert rewards_of(TraceToTriplet().adapt(untimed)) == {"a": None, "b": 0.5}


def test_the_tree_as_text() -> None:
    spans = [
        span("session", "s", None, (100, 110)),
        span("agent", "0123456789", "s", (101, 102.5), agent__name="planner"),
    ]
    assert TracerTraceToTriplet().tree(spans).render() == (
        "session (s) 0.000-10.000s\n  agent [planner] (23456789) 1.000-2.500s"
    )


# several choices


def choices_of_one_response() -> list[Span]:
    """raylight captures three choices as three calls; the client has one span, with the response id."""
    ids = {"gen_ai__agent__name": "writer", "gen_ai__response__id": "chatcmpl-abc"}
    spans = [span("openai.chat", "o", None, (0, 4), **ids)]
    for index, call_id in enumerate(["abc", "def", "ghi"]):
        made = captured("chatcmpl-abc", [1], [2 + index], (1, 3)).model_copy(update={"span_id": call_id})
        made.attributes["raylight.call_id"] = call_id
        spans.append(made)
    return spans


@pytest.mark.parametrize(
    "adapter", [TracerTraceToTriplet(), TracerTraceToTriplet(agent_match="writer"), LlmProxyTraceToTriplet()]
)
def test_each_choice_of_a_response_is_a_triplet(adapter: Any) -> None:
    triplets = adapter(choices_of_one_response())
    assert [triplet.response["token_ids"] for triplet in triplets] == [[2], [3], [4]]
    assert {triplet.metadata["response_id"] for triplet in triplets} == {"chatcmpl-abc"}


def test_the_choices_of_a_judge_are_all_left_out() -> None:
    client = span("openai.chat", "o", "g", (11, 14), gen_ai__response__id="chatcmpl-abc")
    assert (
        TracerTraceToTriplet().adapt(
            [reward_task("g", (10, 20), 0.5), client, *choices_of_one_response()[1:]]
        )
        == []
    )


def test_raw_content_is_kept_as_it_was_recorded() -> None:
    parts = json.dumps([IMAGE])
    recorded = {
        "gen_ai.prompt.0.role": "user",
        "gen_ai.prompt.0.content": parts,
        "gen_ai.prompt.prompt_filter_results": "[]",
        "gen_ai.completion.0.content": "[1]",
    }
    triplet = read_triplet(recorded, None)
    assert triplet.prompt["raw_content"] == {
        "0": {"role": "user", "content": parts},
        "prompt_filter_results": "[]",
    }
    assert triplet.prompt["image_urls"] == ["file:///a.png"]
    assert triplet.response["raw_content"] == [{"content": "[1]"}]
    assert read_triplet({}, None).prompt["raw_content"] is None


async def test_the_images_of_a_prompt_are_read_from_the_store() -> None:
    red = make_image("red")
    content = [{"type": "image_url", "image_url": {"url": recorded_url(red.sha256)}}]
    messages = json.dumps([{"role": "user", "content": content}])
    (url,) = read_triplet({"gen_ai.input.messages": messages}, None).prompt["image_urls"]
    async with open_box() as box:
        await box.store.write_images({red.sha256: red.data})
        files = await box.store.read_images([url.removeprefix("raylight-image:")])
    assert list(files.values()) == [red.data]


def test_the_docs_say_who_opens_the_images_of_a_prompt() -> None:
    page = (Path(__file__).parents[3] / "docs" / "images.md").read_text()
    row = page[page.index("Triplet.prompt") :].partition("\n")[0]
    for text in (inspect.getsource(Triplet), read_triplet.__doc__ or "", row):
        assert "read_images" in text
