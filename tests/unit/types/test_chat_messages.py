"""Reasoning and arguments of chat messages, in all forms that clients write."""

from typing import Any

import pytest

from raylight.store.overview import message_text
from raylight.types.chat_messages import arguments_for_template, reasoning_fields, reasoning_of


@pytest.mark.parametrize(
    ("message", "reasoning"),
    [
        ({"reasoning": "hm"}, "hm"),
        ({"reasoning_content": "hm", "reasoning": ""}, "hm"),
        ({"thinking": "hm"}, "hm"),
        ({"content": [{"type": "thinking", "thinking": "h"}, {"type": "thinking", "thinking": "m"}]}, "h\nm"),
        ({"content": [{"type": "reasoning", "text": "hm"}]}, "hm"),
        ({"content": [{"type": "redacted_thinking", "data": "x"}, 3]}, ""),
        ({"reasoning": {"effort": "low"}, "content": "a"}, ""),
        ({}, ""),
    ],
)
def test_reasoning_has_many_names(message: dict[str, Any], reasoning: str) -> None:
    assert reasoning_of(message) == reasoning
    assert (reasoning in message_text(message)) or not reasoning, "the text search finds it"


def test_templates_get_all_names() -> None:
    assert reasoning_fields("hm", False) == {"reasoning": "hm", "reasoning_content": "hm", "thinking": "hm"}
    assert "thinking" not in reasoning_fields("hm", True)


@pytest.mark.parametrize(
    ("arguments", "mapping"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        (None, {}),
        (" ", {}),
        ('{"a": ', {"INVALID_JSON": '{"a": '}),
        ("[1]", {"INVALID_JSON": "[1]"}),
        ("3", {"INVALID_JSON": "3"}),
        ([1, "é"], {"INVALID_JSON": '[1, "é"]'}),
        (3, {"INVALID_JSON": "3"}),
        ('{"INVALID_JSON": "{"}', {"INVALID_JSON": "{"}),
        ("[" * 100_000, {"INVALID_JSON": "[" * 100_000}),
    ],
)
def test_malformed_arguments_are_text(arguments: Any, mapping: dict[str, Any]) -> None:
    assert arguments_for_template(arguments) == mapping
