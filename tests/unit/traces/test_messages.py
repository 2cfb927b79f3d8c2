"""Conversion of calls to conversations for fine-tuning, from spans of every supported convention."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from template_helpers import result, says, user

from raylight.semconv import DIALECT
from raylight.traces.attributes import parse_literal, unflatten, unflatten_list
from raylight.traces.messages import TraceToMessages, image_urls, openai_messages, read_call
from raylight.types import Span

_sequence = itertools.count(1)
ROOMS = {"type": "object", "properties": {"date": {"type": "string"}}, "required": ["date"]}
CALL: Any = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "rooms", "arguments": '{"date": "today"}'},
}
TOOL: Any = {
    "type": "function",
    "function": {"name": "rooms", "description": "Free rooms", "parameters": ROOMS},
}
CONVERSATION = [
    {"role": "system", "content": "You book rooms."},
    {"role": "user", "content": "Find one."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": '[{"id": "Lyra"}]', "tool_call_id": "call_1"},
]
ANSWER = {"role": "assistant", "content": "Lyra is free."}


def span(attributes: dict[str, Any], name: str = "openai.chat.completion", **fields: Any) -> Span:
    number = next(_sequence)
    common = {"sequence_id": number, "trace_id": "t", "span_id": f"s{number}"}
    return Span(name=name, attributes=attributes, **common | fields)


def flat(prefix: str, value: Any) -> dict[str, Any]:
    """Flatten messages as AgentOps and OpenLLMetry do."""
    if isinstance(value, dict | list):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        return {key: leaf for name, inner in entries for key, leaf in flat(f"{prefix}.{name}", inner).items()}
    return {prefix: value}


def flat_call(call: dict[str, Any]) -> dict[str, Any]:
    return {"id": call["id"], "type": "function", **call["function"]}


CAPTURED = {
    "gen_ai.request.model": "policy",
    "gen_ai.response.id": "chatcmpl-1",
    "gen_ai.input.messages": json.dumps(CONVERSATION),
    "gen_ai.output.messages": json.dumps([ANSWER]),
    "gen_ai.tool.definitions": json.dumps([TOOL]),
}
"""Attributes of a call that raylight captured."""
OPENLLMETRY = (
    {"gen_ai.system": "OpenAI", "gen_ai.response.id": "chatcmpl-1", "llm.request.functions.0.name": "rooms"}
    | {
        "llm.request.functions.0.description": "Free rooms",
        "llm.request.functions.0.parameters": json.dumps(ROOMS),
    }
    | flat("gen_ai.prompt", CONVERSATION[:2])
    | flat("gen_ai.prompt.2", {"role": "assistant", "tool_calls": [flat_call(CALL)]})
    | flat("gen_ai.prompt.3", CONVERSATION[3])
    | flat("gen_ai.completion.0", ANSWER | {"finish_reason": "stop"})
)
"""Attributes of opentelemetry-instrumentation-openai; AgentOps has similar ones."""


def turn(role: str, *parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return a message in OpenTelemetry's current convention."""
    return {"role": role, "parts": list(parts), **more}


TOOL_PART = {"type": "tool_call", "id": "call_1", "name": "rooms", "arguments": {"date": "today"}}
RESULT_PART = {"type": "tool_call_response", "id": "call_1", "response": [{"id": "Lyra"}]}
OTEL_TURNS = [
    turn("user", {"type": "text", "content": "Find one."}),
    turn("assistant", {"type": "reasoning", "content": "hm"}, TOOL_PART),
    turn("tool", RESULT_PART),
]
OTEL_ANSWER = turn("assistant", {"type": "text", "content": "Lyra is free."}, finish_reason="stop")
OTEL = {
    "gen_ai.operation.name": "chat",
    "gen_ai.response.id": "chatcmpl-1",
    "gen_ai.system_instructions": json.dumps([{"type": "text", "content": "You book rooms."}]),
    "gen_ai.input.messages": json.dumps(OTEL_TURNS),
    "gen_ai.output.messages": json.dumps([OTEL_ANSWER]),
    "gen_ai.tool.definitions": json.dumps([{"type": "function", **TOOL["function"]}]),
}
"""Attributes of OpenTelemetry's current convention, which agent-framework follows."""
PROXY = {
    "llm.hosted_vllm.id": "chatcmpl-1",
    "llm.hosted_vllm.model": "policy",
    "llm.hosted_vllm.messages": str(CONVERSATION),
    "llm.hosted_vllm.tools": str([TOOL]),
    "llm.hosted_vllm.choices": str([{"message": ANSWER | {"tool_calls": []}, "finish_reason": "stop"}]),
}
"""Attributes of agent-lightning's LLM proxy, with LiteLLM's Python notation."""
WEAVE = flat("agentlightning.operation.input", {"messages": CONVERSATION, "tools": [TOOL]}) | flat(
    "agentlightning.operation.output", {"id": "chatcmpl-1", "choices": [{"message": ANSWER}]}
)
TOOL_USE = {"type": "tool_use", "id": "call_1", "name": "rooms", "input": {"date": "today"}}
TOOL_RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": '[{"id": "Lyra"}]'}
ANTHROPIC = {
    "gen_ai.response.id": "msg_1",
    "gen_ai.system_instructions": "You book rooms.",
    "gen_ai.input.messages": json.dumps([user("Find one."), says([TOOL_USE]), user([TOOL_RESULT])]),
    "gen_ai.output.messages": json.dumps([says([{"type": "text", "text": "Lyra is free."}])]),
    "gen_ai.tool.definitions": json.dumps(
        [{"name": "rooms", "description": "Free rooms", "input_schema": ROOMS}]
    ),
}
ITEMS = [
    CONVERSATION[0],
    {"type": "message"} | user([{"type": "input_text", "text": "Find one."}]),
    {"type": "reasoning", "summary": []},
    {"type": "function_call", "call_id": "call_1", "id": "fc_1", **CALL["function"]},
    {"type": "function_call_output", "call_id": "call_1", "output": '[{"id": "Lyra"}]'},
]
ANSWER_ITEM = {"type": "message"} | says([{"type": "output_text", "text": "Lyra is free."}])
RESPONSES = {
    "gen_ai.response.id": "resp_1",
    "gen_ai.input.messages": json.dumps(ITEMS),
    "gen_ai.output.messages": json.dumps([ANSWER_ITEM]),
    "gen_ai.tool.definitions": OTEL["gen_ai.tool.definitions"],
}


@pytest.mark.parametrize("attributes", [CAPTURED, OPENLLMETRY, OTEL, PROXY, WEAVE, ANTHROPIC, RESPONSES])
def test_every_convention_gives_the_same_conversation(attributes: dict[str, Any]) -> None:
    (item,) = TraceToMessages()([span(attributes)])
    assert item == {"messages": [*CONVERSATION, ANSWER], "tools": [TOOL]}


def test_tool_calls_of_an_answer_that_agentops_has_as_spans_below() -> None:
    tool = {"tool.name": "rooms", "tool.parameters": '{"date": "today"}', "tool.call.type": "function"}
    asked = flat("gen_ai.prompt", CONVERSATION[:2]) | {"gen_ai.completion.0.role": "assistant"}
    spans = [
        span(tool | {"tool.call.id": "call_1"}, "tool_call.rooms", parent_id="c"),
        span(tool | {"tool.call.id": "call_2"}, "tool_call.rooms", parent_id="c"),
        span(asked, span_id="c"),
    ]
    (item,) = TraceToMessages().adapt(spans)
    answer = says(None, CALL, CALL | {"id": "call_2"})
    assert item == {"messages": [*CONVERSATION[:2], answer], "tools": None}


def test_every_call_is_an_item_in_order_and_a_call_that_two_spans_tell_of_is_one() -> None:
    asked = flat("gen_ai.prompt", CONVERSATION[:2])
    bare = span({"gen_ai.response.id": "chatcmpl-1", "gen_ai.request.model": "policy"} | asked)
    other = span(asked | flat("gen_ai.completion.0", ANSWER))
    items = TraceToMessages().adapt([bare, other, span(CAPTURED)])
    assert [len(item["messages"]) for item in items] == [5, 3]


def test_spans_without_messages_and_of_agents_or_tools_are_left_out() -> None:
    agent = CAPTURED | {"gen_ai.operation.name": "invoke_agent"}
    others = [{"gen_ai.request.model": "policy"}, {"agentlightning.reward.0.value": 1.0}, {}]
    assert TraceToMessages().adapt([span(attributes) for attributes in (agent, *others)]) == []
    assert TraceToMessages().adapt([]) == []


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({"tool_calls": [flat_call(CALL)]}, says(None, CALL)),
        ({"content": "x", "tool_call_id": "call_1"}, result("x", "call_1")),
        ({"content": "x"}, user("x")),
        ({"role": "user"}, user("")),
        ("x", user("x")),
        (says(""), says("")),
        ({"role": "user", "name": "Ann", "content": "x"}, {"role": "user", "name": "Ann", "content": "x"}),
    ],
)
def test_messages_without_role_or_content_are_mended(recorded: Any, message: dict[str, Any]) -> None:
    """Some tracers drop the role of tool calls and of their results."""
    assert openai_messages([recorded], "user") == [message]


IMAGE = [{"type": "text", "text": "How many?"}, {"type": "image_url", "image_url": {"url": "file:///a.png"}}]


IMAGE_PARTS = [
    {"type": "text", "content": "How many?"},
    {"type": "uri", "modality": "image", "uri": "file:///a.png"},
]


@pytest.mark.parametrize("message", [user(IMAGE), user(json.dumps(IMAGE)), turn("user", *IMAGE_PARTS)])
def test_images(message: dict[str, Any]) -> None:
    assert openai_messages([message], "user") == [user(IMAGE)]


ANTHROPIC_IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
BLOB = {"type": "blob", "modality": "image", "mime_type": "image/png"}


@pytest.mark.parametrize(
    "part",
    [
        BLOB | {"content": "AAAA"},
        ANTHROPIC_IMAGE,
        {"type": "image", "source": {"type": "url", "url": "data:image/png;base64,AAAA"}},
        {"type": "input_image", "image_url": "data:image/png;base64,AAAA", "detail": "low"},
    ],
)
def test_an_image_in_a_span_becomes_a_url(part: dict[str, Any]) -> None:
    (message,) = openai_messages([{"role": "user", "parts": [part]}], "user")
    assert message["content"] == [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


def test_an_image_that_a_tool_returned() -> None:
    shown = {"type": "tool_result", "tool_use_id": "call_1", "content": [ANTHROPIC_IMAGE]}
    (message,) = openai_messages([{"role": "user", "content": [shown]}], "user")
    assert message["content"] == [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]


@pytest.mark.parametrize("part", [BLOB, {"type": "uri", "modality": "image", "uri": None}])
def test_an_image_that_was_not_recorded_has_no_url(part: dict[str, Any]) -> None:
    """As of pydantic-ai with `include_binary_content=False`."""
    (message,) = openai_messages([turn("user", part)], "user")
    assert message["content"] == [part]
    assert image_urls([message]) == []


def test_a_captured_call_precedes_a_span_of_a_framework_without_contents() -> None:
    bare = turn("user", {"type": "text"}), turn("assistant", {"type": "text"})
    names = ("gen_ai.response.id", "gen_ai.tool.definitions")
    framework = {name: CAPTURED[name] for name in names} | {
        "gen_ai.input.messages": json.dumps(bare[:1]),
        "gen_ai.output.messages": json.dumps(bare[1:]),
    }
    captured = {name: CAPTURED[name] for name in CAPTURED if name != names[1]} | {DIALECT: "chat"}
    for attributes in itertools.permutations([framework, captured]):
        (item,) = TraceToMessages().adapt([span(one) for one in attributes])
        assert item["messages"] == [*CONVERSATION, ANSWER]


@pytest.mark.parametrize(
    "text",
    ['{"score": 1, "type": "good"}', '[{"type": "text", "text": "Hi"}]', "[1, 2]", "{'a': 1}", "[", "{}"],
)
def test_an_answer_that_looks_like_a_list_or_dict_is_text(text: str) -> None:
    assert openai_messages([{"role": "assistant", "content": text}], "assistant")[0]["content"] == text
    attributes = {"gen_ai.prompt.0.content": "x", "gen_ai.completion.0.content": text}
    assert read_call(attributes).answers == [{"role": "assistant", "content": text}]


def test_of_several_choices_the_first_is_the_answer() -> None:
    choices = [{"message": {"role": "assistant", "content": letter}} for letter in "ab"]
    (item,) = TraceToMessages()([span(PROXY | {"llm.hosted_vllm.choices": json.dumps(choices)})])
    assert item["messages"][-1]["content"] == "a"
    assert len(read_call({"gen_ai.output.messages": json.dumps(choices)}).answers) == 2


def test_a_completion_of_plain_text() -> None:
    answer = json.dumps([{"text": " a time"}])
    attributes = {"gen_ai.input.messages": "Once upon", "gen_ai.output.messages": answer}
    (item,) = TraceToMessages()([span(attributes)])
    assert item["messages"] == [user("Once upon"), says(" a time")]


def test_tools_that_are_no_functions_stay() -> None:
    search = {"type": "web_search"}
    assert read_call({"gen_ai.tool.definitions": json.dumps([search])}).tools == [search]


# reading attributes


def test_flattened_entries_come_in_the_order_of_their_numbers_with_gaps_closed() -> None:
    attributes = {"p.10.a": 1, "p.2.a": 2, "p.other": 3, "px.0.a": 4, "p": 5}
    assert unflatten_list(attributes, "p") == [{"a": 2}, {"a": 1}]
    assert unflatten(attributes, "p") == {"10": {"a": 1}, "2": {"a": 2}, "other": 3}
    assert unflatten(attributes, "q") is None


@pytest.mark.parametrize("attributes", [{"p.a": 1, "p.a.b": 2}, {"p.a.b": 2, "p.a": 1}])
def test_a_value_gives_way_to_its_fields(attributes: dict[str, Any]) -> None:
    assert unflatten(attributes, "p") == {"a": {"b": 2}}


LEAVES = st.text(max_size=3) | st.integers() | st.booleans()
NESTED = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "c"]), inner, min_size=1, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), NESTED, min_size=1))
def test_unflattening_undoes_flattening(value: dict[str, Any]) -> None:
    assert unflatten(flat("p", value), "p") == value


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[1, 2]", [1, 2]),
        ("{'a': None}", {"a": None}),
        ('{"a": null}', {"a": None}),
        ("[oops", "[oops"),
        ("12", "12"),
        (3, 3),
    ],
)
def test_texts_in_either_notation_are_parsed(text: Any, value: Any) -> None:
    assert parse_literal(text) == value


@given(
    st.dictionaries(
        st.sampled_from([*CAPTURED, *OPENLLMETRY, *PROXY, *WEAVE]),
        st.text(max_size=5) | LEAVES | st.just("[{}]"),
    )
)
def test_no_attributes_however_odd_fail_an_adapter(attributes: dict[str, Any]) -> None:
    for item in TraceToMessages()([span(attributes)]):
        assert all({"role", "content"} <= message.keys() for message in item["messages"])
