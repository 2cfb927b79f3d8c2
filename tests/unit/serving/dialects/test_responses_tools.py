"""Tools of responses other than functions: custom tools, namespaces, and tools that a provider runs."""

import hashlib
import json
from typing import Any

import openai
import pydantic
import pytest
from app_clients import openai_client
from dialect_helpers import WEATHER, FakeChat, Say, call
from openai.types.responses import Response, ResponseStreamEvent

from raylight.images.messages import recorded_url
from raylight.serving.dialects.translate import TranslationMiddleware

PATCH = "*** Begin Patch\n*** End Patch"
CUSTOM = {"type": "custom", "name": "apply_patch", "description": "Edit files."}
CLOCK = {
    "type": "namespace",
    "name": "clock",
    "description": "Tools of time.",
    "tools": [{"type": "function", "name": "sleep", "parameters": WEATHER}],
}
EVENTS = pydantic.TypeAdapter(ResponseStreamEvent)


async def ask(say: Say, items: Any = "hi", **fields: Any) -> tuple[FakeChat, Response, list[str]]:
    """Return the application, the answer, and the types of the tools that were dropped."""
    dropped: list[str] = []
    fake = FakeChat(say)
    client = openai_client(TranslationMiddleware(fake, count_dropped=dropped.append))
    answer = await client.responses.create(model="policy", input=items, **fields)
    return fake, answer, dropped


async def test_a_custom_tool_is_a_function_with_one_text() -> None:
    said = Say(calls=[call("c1", json.dumps({"input": PATCH}), "apply_patch")])
    fake, answer, _ = await ask(said, tools=[CUSTOM])
    (tool,) = fake.asked[0]["tools"]
    assert tool["function"]["name"] == "apply_patch"
    assert tool["function"]["description"] == "Edit files."
    assert tool["function"]["parameters"]["required"] == ["input"]
    (item,) = answer.output
    assert (item.type, item.name, item.input, item.call_id) == (
        "custom_tool_call",
        "apply_patch",
        PATCH,
        "c1",
    )
    assert item.id.startswith("ctc_")
    assert answer.tools[0].type == "custom"


async def test_the_grammar_of_a_custom_tool_is_described() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: WORD"}
    fake, _, _ = await ask(Say("ok"), tools=[CUSTOM | {"format": grammar}])
    described = fake.asked[0]["tools"][0]["function"]["description"]
    assert described == "Edit files.\nThe input follows this grammar (lark):\nstart: WORD"


@pytest.mark.parametrize("arguments", ["no json", "[1]", '{"text": "x"}', '{"input": 1}'])
async def test_arguments_of_another_form_are_the_input(arguments: str) -> None:
    _, answer, _ = await ask(Say(calls=[call("c1", arguments, "apply_patch")]), tools=[CUSTOM])
    assert answer.output[0].input == arguments


async def test_a_call_of_a_custom_tool_is_sent_back_as_it_was_made() -> None:
    arguments = json.dumps({"input": PATCH})
    items = [
        {"role": "user", "content": "hi"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": PATCH},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
    ]
    fake, _, _ = await ask(Say("ok"), items, tools=[CUSTOM])
    _, made, result = fake.asked[0]["messages"]
    assert made["tool_calls"] == [call("c1", arguments, "apply_patch")]
    assert result == {"role": "tool", "tool_call_id": "c1", "content": "Done"}


async def test_tools_of_a_namespace_have_its_name_in_theirs() -> None:
    fake, answer, _ = await ask(Say(calls=[call("c1", "{}", "clock__sleep")]), tools=[CLOCK])
    assert [tool["function"]["name"] for tool in fake.asked[0]["tools"]] == ["clock__sleep"]
    item = answer.output[0].to_dict()
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "clock", "sleep")
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c1", "name": "sleep", "namespace": "clock", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": ""},
    ]
    fake, _, _ = await ask(Say("ok"), items, tools=[CLOCK])
    assert fake.asked[0]["messages"][1]["tool_calls"] == [call("c1", "{}", "clock__sleep")]


async def test_tools_and_settings_of_the_input_are_those_of_the_request() -> None:
    items = [
        {"type": "additional_tools", "role": "developer", "tools": [CUSTOM, CLOCK]},
        {"role": "user", "content": "hi"},
        {"type": "configuration_update", "reasoning": {"effort": "low"}},
    ]
    fake, _, _ = await ask(Say("ok"), items, reasoning={"effort": "high"})
    assert fake.asked[0]["messages"] == [{"role": "user", "content": "hi"}]
    assert [tool["function"]["name"] for tool in fake.asked[0]["tools"]] == ["apply_patch", "clock__sleep"]
    assert fake.asked[0]["reasoning_effort"] == "low"


async def test_tools_that_a_provider_runs_are_dropped_and_counted() -> None:
    tools = [{"type": "web_search", "search_context_size": "low"}, CUSTOM, {"type": "image_generation"}]
    fake, _, dropped = await ask(Say("ok"), tools=tools)
    assert [tool["function"]["name"] for tool in fake.asked[0]["tools"]] == ["apply_patch"]
    assert dropped == ["web_search", "image_generation"]


async def test_a_request_with_dropped_tools_alone_has_none() -> None:
    fake, _, dropped = await ask(Say("ok"), tools=[{"type": "web_search"}], tool_choice="auto")
    assert "tools" not in fake.asked[0]
    assert dropped == ["web_search"]


async def test_an_error_names_the_place_of_a_tool_in_the_request() -> None:
    bad = {"type": "function", "name": "f", "parameters": {"type": "string"}}
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\]\.tools\[0\]\.parameters: the schema"):
        await ask(Say("ok"), tools=[{"type": "web_search"}, CLOCK | {"tools": [bad]}])
    with pytest.raises(openai.BadRequestError, match=r"tools\[1\]\.name: another tool has the name"):
        await ask(Say("ok"), tools=[CUSTOM, CUSTOM])


async def test_a_streamed_call_of_a_custom_tool_has_the_events_of_the_sdk() -> None:
    said = Say(calls=[call("c1", json.dumps({"input": PATCH}), "apply_patch")])
    client = openai_client(TranslationMiddleware(FakeChat(said)))
    events = [
        event
        async for event in await client.responses.create(
            model="policy", input="hi", tools=[CUSTOM], stream=True
        )
    ]
    for event in events:
        EVENTS.validate_python(event.to_dict(), strict=False)
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert events[3].delta == events[4].input == events[5].item.input == PATCH


async def test_images_of_a_tool_become_a_message_of_the_user() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "high"}
    items = [
        {"role": "user", "content": "hi"},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [image]},
    ]
    fake, _, _ = await ask(Say("ok"), items)
    url = recorded_url(hashlib.sha256(b"\0").hexdigest())
    part = {"type": "image_url", "image_url": {"url": url, "detail": "high"}}
    assert fake.asked[0]["messages"][2:] == [
        {"role": "tool", "tool_call_id": "c1", "content": ""},
        {"role": "user", "content": [part]},
    ]
