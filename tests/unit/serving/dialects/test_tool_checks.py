"""Checks of the schemas in a chat request."""

import threading
from typing import Any

import pytest

from raylight.http.errors import RequestError
from raylight.serving.dialects import chat_normalizer
from raylight.serving.dialects.chat_normalizer import (
    CHECKED_AT_ONCE,
    MAX_CHECKED,
    check_large_schemas,
    check_response_format,
    check_tools,
)

OBJECT: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def tool(name: Any = "add", **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


@pytest.mark.parametrize(
    "tools",
    [
        None,
        [],
        [tool()],
        [tool(parameters=OBJECT), tool("a.b-c_1", parameters={})],
        [tool(parameters={"$schema": "http://json-schema.org/draft-07/schema#", **OBJECT})],
        [tool(parameters=OBJECT | {"properties": {"a": {"type": "array", "items": [{"type": "string"}]}}})],
        [tool(parameters=OBJECT | {"$defs": {"a": OBJECT}, "properties": {"a": {"$ref": "#/$defs/a"}}})],
        [tool(parameters={"properties": {"a": {"pattern": r"^\p{Lu}(?<year>\d+)$"}}})],  # as Zod writes them
        [tool("x" * 128)],
        "no list; the engine rejects it",
        [3, {"type": "function"}, {"type": "function", "function": 3}, tool(None)],
    ],
)
def test_sound_tools_pass_and_their_form_is_left_to_the_engine(tools: Any) -> None:
    check_tools(tools)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (tool("two words"), "tools[1].function.name: 'two words' is not a name of a tool"),
        (tool(""), "tools[1].function.name: '' is not a name"),
        (tool("x" * 129), "tools[1].function.name: "),
        (tool("größe"), "tools[1].function.name: 'größe'"),
        (tool(parameters=[]), "tools[1].function.parameters: the schema of tool 'add' must be an object"),
        (tool(parameters={"type": "string"}), "must have the type 'object', not 'string'"),
        (
            tool(parameters={"type": "object", "properties": {"a": {"type": "strng"}}}),
            "tools[1].function.parameters: the schema of tool 'add' is not a valid JSON schema: at "
            "properties.a.type: 'strng'",
        ),
        (tool(parameters={"properties": ["a"]}), "at properties: ['a'] is not of type 'object'"),
        (tool(parameters=OBJECT | {"required": "a"}), "at required: "),
        (tool(parameters={"$defs": {"a": {"type": "strng"}}}), "at definitions.a.type: "),
    ],
)
def test_a_wrong_tool_is_named_with_its_field(wrong: Any, message: str) -> None:
    for _ in range(2):  # the second check is remembered
        with pytest.raises(RequestError) as caught:
            check_tools([tool("fine"), wrong])
        assert message in caught.value.message
        assert caught.value.status == 400
        assert (caught.value.param or "").startswith("tools[1].function.")


def test_a_schema_that_would_take_seconds_to_check_is_left_to_the_engine() -> None:
    wrong = {"anyOf": [{"type": "strng"}] * 10}
    huge = {"description": "x" * MAX_CHECKED}
    check_tools([tool(parameters=huge), tool(parameters=wrong)])
    with pytest.raises(RequestError):
        check_tools([tool(parameters=wrong), tool(parameters=huge)])


def test_the_schema_of_the_answer_is_checked() -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "strng"}}}
    with pytest.raises(RequestError, match=r"^response_format\.json_schema\.schema: .*at type: 'strng'"):
        check_response_format(wrong)
    for fine in (None, {"type": "text"}, {"type": "json_schema", "json_schema": {"schema": OBJECT}}, "x"):
        check_response_format(fine)


async def test_large_schemas_are_checked_in_a_thread_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []
    find = chat_normalizer._find_problem

    def recorded(encoded: bytes) -> str | None:
        threads.append(threading.current_thread())
        return find(encoded)

    monkeypatch.setattr(chat_normalizer, "_find_problem", recorded)
    large = {"type": "object", "description": "x" * CHECKED_AT_ONCE, "properties": {"a": {"type": "strng"}}}
    body = {"tools": [tool(parameters=large)], "response_format": {"json_schema": {"schema": OBJECT}}}
    await check_large_schemas(body)
    with pytest.raises(RequestError, match=r"properties\.a\.type"):
        check_tools(body["tools"])
    await check_large_schemas(body)
    assert threads
    assert len(threads) <= 2
    assert threading.main_thread() not in threads
    for nothing in ({}, {"tools": 3, "response_format": 3}, {"tools": [3], "response_format": {}}):
        await check_large_schemas(nothing)
