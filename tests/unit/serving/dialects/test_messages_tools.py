"""Tools of messages that a provider runs, and those that are loaded when a search has found them."""

from typing import Any

import anthropic
import pytest
from app_clients import anthropic_client
from dialect_helpers import WEATHER, FakeChat, Say

from raylight.serving.dialects.translate import TranslationMiddleware

PLAIN = {"name": "plain", "input_schema": WEATHER}
DEFERRED = {"name": "deferred", "input_schema": WEATHER, "defer_loading": True}
SEARCH = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
WEB = {"type": "web_search_20250305", "name": "web_search", "max_uses": 5}


async def given(tools: list[dict[str, Any]], *more: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the names of the tools that the model gets, and the types of those that are dropped."""
    dropped: list[str] = []
    fake = FakeChat(Say("ok"))
    client = anthropic_client(TranslationMiddleware(fake, count_dropped=dropped.append))
    messages = [{"role": "user", "content": "hi"}, *more]
    await client.messages.create(model="policy", max_tokens=9, messages=messages, tools=tools)  # type: ignore[arg-type]
    return [tool["function"]["name"] for tool in fake.asked[0].get("tools", [])], dropped


async def test_tools_that_a_provider_runs_are_dropped_and_counted() -> None:
    assert await given([WEB, PLAIN]) == (["plain"], ["web_search"])


async def test_a_deferred_tool_is_given_once_a_result_names_it() -> None:
    assert await given([PLAIN, DEFERRED]) == (["plain"], [])
    used = {"type": "tool_use", "id": "t1", "name": "plain", "input": {}}
    found = {"type": "tool_reference", "tool_name": "deferred"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [found]}
    turns = ({"role": "assistant", "content": [used]}, {"role": "user", "content": [result]})
    assert await given([PLAIN, DEFERRED], *turns) == (["plain", "deferred"], [])


async def test_deferred_tools_are_given_at_once_if_nobody_searches_for_them() -> None:
    assert await given([SEARCH, PLAIN, DEFERRED]) == (["plain", "deferred"], ["tool_search_tool_regex"])


async def test_a_provider_shortens_no_conversation_here() -> None:
    fake = FakeChat(Say("ok"), Say("ok"))
    client = anthropic_client(TranslationMiddleware(fake))
    edits = {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}}
    messages = [{"role": "user", "content": "hi"}]
    await client.messages.create(model="policy", max_tokens=9, messages=messages, extra_body=edits)  # type: ignore[arg-type]
    assert "context_management" not in fake.asked[0]
    counted = await client.messages.count_tokens(model="policy", messages=messages, extra_body=edits)  # type: ignore[arg-type]
    assert counted.input_tokens == 5


async def test_an_error_names_the_place_of_a_tool_in_the_request() -> None:
    bad = {"name": "f", "input_schema": {"type": "string"}}
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[2\]\.input_schema: the schema"):
        await given([WEB, DEFERRED, bad])
