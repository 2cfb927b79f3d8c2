"""Parsing of reasoning, content and tool calls from text, split at any position."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylight.engines.transformers.message import MessageParser, find_style
from raylight.engines.transformers.tools import FORMATS

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}}
Parsed = tuple[str, str, list[tuple[str, str]]]


def parse(text: str, format: str | None = "hermes", thinking: bool | None = None, cut: int = 0) -> Parsed:
    """Parse a text in pieces of `cut` characters (0: in one piece) into reasoning, content and calls."""
    parser = MessageParser(FORMATS[format] if format else None, TOOLS, thinking)  # type: ignore[index]
    pieces = [text[i : i + cut] for i in range(0, len(text), cut)] if cut else [text]
    found = [p for i, piece in enumerate(pieces or [""]) for p in parser.feed(piece, i >= len(pieces) - 1)]
    calls = [(p.call.name, p.call.arguments) for p in found if p.call]
    reasoning, content = (
        "".join(p.text for p in found if p.kind == kind) for kind in ("reasoning", "content")
    )
    return reasoning, content, calls


ADD = ("add", '{"a": 1}')
CASES: list[tuple[str, Parsed]] = [
    ("hello", ("", "hello", [])),
    ("  hello \n", ("", "  hello \n", [])),
    (CALL, ("", "", [ADD])),
    (f"I add.\n{CALL}\n{CALL}", ("", "I add.", [ADD, ADD])),
    (f"{CALL} done", ("", "done", [ADD])),
    (CALL.removesuffix("</tool_call>"), ("", "", [ADD])),
    ("a < b <tool", ("", "a < b <tool", [])),
    ("x <tool_call>\nno json\n</tool_call> y", ("", "x <tool_call>\nno json\n</tool_call> y", [])),
    ('<tool_call>{"name": "add"}</tool_call>', ("", '<tool_call>{"name": "add"}</tool_call>', [])),
    (
        '<tool_call>{"name": "add", "arguments": {"a": ',
        ("", '<tool_call>{"name": "add", "arguments": {"a": ', []),
    ),
    (CALL.replace("1", "NaN"), ("", CALL.replace("1", "NaN"), [])),
    ("<tool_call>[1]</tool_call>" + CALL, ("", "<tool_call>[1]</tool_call>", [ADD])),
    (
        '<tool_call>{"name":"x","arguments":{"t": "</tool_call>\\""}}</tool_call>!',
        ("", "!", [("x", '{"t": "</tool_call>\\""}')]),
    ),
    (
        '<tool_call>{"name": "é", "arguments": {"t": "ü\\ud800"}}</tool_call>',
        ("", "", [("é", '{"t": "\\u00fc\\ud800"}')]),
    ),
]


@pytest.mark.parametrize(("text", "expected"), CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("cut", [0, 1, 2, 7])
def test_hermes(text: str, expected: Parsed, cut: int) -> None:
    assert parse(text, cut=cut) == expected


@given(st.text('<tool_call>/{}" \n', max_size=30), st.integers(0, 5))
def test_text_that_calls_nothing_stays_as_it_is(text: str, cut: int) -> None:
    assert parse(text, cut=cut) == ("", text, [])
    assert parse(text, format=None, cut=cut) == ("", text, [])


@pytest.mark.parametrize("cut", [0, 1, 5])
@pytest.mark.parametrize(
    ("text", "thinking", "expected"),
    [
        ("<think>\nhm, \n2\n</think>\n\nfour", False, ("hm, \n2", "four", [])),
        ("hm\n</think>\n\nfour ", True, ("hm", "four ", [])),
        (" four", False, ("", " four", [])),
        ("<thin", False, ("", "<thin", [])),
        ("<think>cut", False, ("cut", "", [])),
        ("<think>\n\n</think>\n\nfour", False, ("", "four", [])),
        (f"<think>\n{CALL}?</think>\n{CALL}", False, (f"{CALL}?", "", [ADD])),
        ("four <think>five</think>", False, ("", "four <think>five</think>", [])),
        ("<think>five</think>", None, ("", "<think>five</think>", [])),
    ],
)
def test_thoughts(text: str, thinking: bool | None, expected: Parsed, cut: int) -> None:
    assert parse(text, thinking=thinking, cut=cut) == expected


@pytest.mark.parametrize("cut", [0, 1])
def test_qwen_xml(cut: int) -> None:
    call = (
        "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
        "<parameter=note>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    assert parse(f"So:\n{call}", "qwen_xml", cut=cut) == ("", "So:", [("add", '{"a": 1, "note": "2"}')])
    assert parse(call.replace("</function>", ""), "qwen_xml", cut=cut)[2] == []


@pytest.mark.parametrize("cut", [0, 1])
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', "", [ADD]),
        (
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "add", "parameters": {"a": 1}}',
            "",
            [ADD, ADD],
        ),
        ('{"name": "add"}', '{"name": "add"}', []),
        (' plain {"name"', ' plain {"name"', []),
        ("{ not json ", "{ not json ", []),
        ("", "", []),
    ],
)
def test_llama_json(text: str, content: str, calls: list[tuple[str, str]], cut: int) -> None:
    assert parse(text, "llama_json", cut=cut) == ("", content, calls)


def test_plain_text_streams_even_where_the_whole_answer_may_be_a_call() -> None:
    parser = MessageParser(FORMATS["llama_json"], TOOLS, None)
    assert [p.text for p in parser.feed("Well")] == ["Well"]


class Templated:
    def __init__(self, template: Any) -> None:
        self.chat_template = template


@pytest.mark.parametrize(
    ("template", "format", "thinks"),
    [
        ("{{ messages }}", None, False),
        ("use <tool_call>", "hermes", False),
        ("<tool_call><function=", "qwen_xml", False),
        ('{"name": function name, "parameters": dictionary', "llama_json", False),
        ("<think>", None, True),
        (None, None, False),
        ({"default": "", "tool_use": "<tool_call>"}, "hermes", False),
    ],
)
def test_a_template_tells_how_its_model_writes(template: Any, format: str | None, thinks: bool) -> None:
    style = find_style(Templated(template), "auto", "auto")
    assert (style.tool_format, style.thinks) == (FORMATS[format] if format else None, thinks)  # type: ignore[index]
    chosen = find_style(Templated(template), "qwen_xml", False)
    assert (chosen.tool_format, chosen.thinks) == (FORMATS["qwen_xml"], False)
    assert find_style(Templated(template), None, True).tool_format is None


def test_every_call_has_an_id_of_its_own() -> None:
    parser = MessageParser(FORMATS["hermes"], TOOLS, None)
    calls = [p.call.as_message_part() for p in parser.feed(CALL * 3, True) if p.call]
    assert len({call["id"] for call in calls}) == 3
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1}
