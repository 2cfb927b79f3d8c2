"""Parsing of reasoning, content and tool calls from text, split at any position."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylight.engines.families import HARMONY, THINK
from raylight.engines.transformers.message import (
    HARMONY_FORMAT,
    HarmonyParser,
    MessageParser,
    MessageStyle,
    find_style,
)
from raylight.engines.transformers.tools import FORMATS
from raylight.types.json_object import parse_json

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
TOOLS = {"add": {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}}}
Parsed = tuple[str, str, list[tuple[str, str]]]


def parse(text: str, format: str | None = "hermes", thinking: bool | None = None, cut: int = 0) -> Parsed:
    """Parse a text in pieces of `cut` characters (0: in one piece) into reasoning, content and calls."""
    parser = MessageParser(FORMATS[format] if format else None, TOOLS, thinking)
    return collect(parser, text, cut)


def collect(parser: MessageParser | HarmonyParser, text: str, cut: int) -> Parsed:
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


NOTED = ("add", '{"a": 1, "note": "2"}')
DSML = (
    '<｜DSML｜{0}>\n<｜DSML｜invoke name="add">\n'
    '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="note" string="true">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜{0}>'
)
KIMI = '<|tool_call_begin|>functions.add:{0}<|tool_call_argument_begin|>{{"a": 1}}<|tool_call_end|>'
V31 = '<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜>'
V3 = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
NOTATIONS: list[tuple[str, str, list[tuple[str, str]]]] = [
    (
        "glm",
        "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>note</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
        [NOTED],
    ),
    ("glm", "<tool_call>now</tool_call><tool_call>now\n</tool_call>", [("now", "{}"), ("now", "{}")]),
    (
        "seed_xml",
        "<seed:tool_call>\n<function=add>\n<parameter=a>1</parameter>\n<parameter=note>2</parameter>\n"
        "</function>\n</seed:tool_call>",
        [NOTED],
    ),
    (
        "minimax_m2",
        '<minimax:tool_call>\n<invoke name="add">\n<parameter name="a">1</parameter>\n</invoke>\n'
        '<invoke name="add">\n<parameter name="a">1</parameter>\n<parameter name="note">2</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
        [ADD, NOTED],
    ),
    ("deepseek_v32", DSML.format("function_calls"), [NOTED]),
    ("deepseek_v4", DSML.format("tool_calls"), [NOTED]),
    ("deepseek_v31", f"<｜tool▁calls▁begin｜>{V31}{V31}<｜tool▁calls▁end｜>", [ADD, ADD]),
    ("deepseek_v3", f"<｜tool▁calls▁begin｜>{V3}\n{V3}<｜tool▁calls▁end｜>", [ADD, ADD]),
    (
        "kimi_k2",
        f"<|tool_calls_section_begin|>{KIMI.format(0)}{KIMI.format(1)}<|tool_calls_section_end|>",
        [ADD, ADD],
    ),
    (
        "mistral_args",
        '[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[CALL_ID]abc123def[ARGS]{"a": 1}',
        [ADD, ADD],
    ),
    ("mistral_json", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', [ADD]),
    (
        "cohere",
        '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}\n]'
        "<|END_ACTION|>",
        [ADD],
    ),
    ("nemotron_json", '<TOOLCALL>[{"name": "add", "arguments": {"a": 1}}]</TOOLCALL>', [ADD]),
    ("granite", '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]', [ADD]),
    ("functools", 'functools[{"name": "add", "arguments": {"a": 1}}]', [ADD]),
    ("phi4_mini", '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]<|/tool_call|>', [ADD]),
    (
        "gemma4",
        '<|tool_call>call:add{a:1,note:<|"|>2<|"|>}<tool_call|><|tool_call>call:now{}<tool_call|>',
        [NOTED, ("now", "{}")],
    ),
    (
        "gemma4",
        '<|tool_call>call:f{k:[{x:<|"|>a{b:"<|"|>}],z:true}<tool_call|>',
        [("f", '{"k": [{"x": "a{b:\\""}], "z": true}')],
    ),
    ("lfm2", "<|tool_call_start|>[add(a=1, note='2'), now()]<|tool_call_end|>", [NOTED, ("now", "{}")]),
    (
        "lfm2",
        "<|tool_call_start|>[f(k=[true, {'x': null}])]<|tool_call_end|>",
        [("f", '{"k": [true, {"x": null}]}')],
    ),
    ("olmo3", '<function_calls>\nadd(a=1)\nadd(a=1, note="2")\n</function_calls>', [ADD, NOTED]),
]


@pytest.mark.parametrize("cut", [0, 1, 7])
@pytest.mark.parametrize(("notation", "text", "calls"), NOTATIONS)
def test_notations(notation: str, text: str, calls: list[tuple[str, str]], cut: int) -> None:
    assert parse(f"So:\n{text}", notation, cut=cut) == ("", "So:", calls)
    assert parse(f"So:\n{text}", notation, thinking=True, cut=cut) == (f"So:\n{text}".strip(), "", [])


@pytest.mark.parametrize("notation", sorted(FORMATS))
def test_a_cut_or_malformed_call_stays_content(notation: str) -> None:
    opening, closing = FORMATS[notation].open, FORMATS[notation].close
    for body in ("{", "nonsense here", "[1]", "f(", "call:f{", '[{"name": 1}]', ""):
        for text in (f"{opening}{body}{closing}", f"{opening}{body}"):
            assert parse(f"So: {text}", notation)[1:] == (f"So: {text}", [])


@pytest.mark.parametrize(("notation", "text", "calls"), NOTATIONS)
def test_arguments_are_json_whatever_numbers_a_model_writes(
    notation: str, text: str, calls: list[tuple[str, str]]
) -> None:
    for number in ("1e999", "-1e999", "NaN", "Infinity"):
        for old in filter(text.__contains__, ('"a": 1', "a=1", "a:1", ">1<")):
            _, content, found = parse(text.replace(old, old.replace("1", number)), notation)
            assert number in content + str(found)
            assert all(parse_json(arguments) is not None for _, arguments in found)


@given(st.sampled_from(NOTATIONS), st.integers(0, 60), st.text('<|>{}[]"=:\n', max_size=12))
def test_no_text_raises(case: tuple[str, str, Any], at: int, noise: str) -> None:
    notation, text, _ = case
    parse(text[:at] + noise + text[at:], notation)


def test_ids_that_a_family_demands() -> None:
    def ids(notation: str, text: str) -> list[str]:
        pieces = MessageParser(FORMATS[notation], TOOLS, None).feed(text, last=True)
        return [piece.call.id for piece in pieces if piece.call]

    cases = {notation: text for notation, text, _ in NOTATIONS}
    assert ids("kimi_k2", cases["kimi_k2"]) == ["functions.add:0", "functions.add:1"]
    first, second = ids("mistral_args", cases["mistral_args"])
    assert (len(first), first.isalnum(), second) == (9, True, "abc123def")
    assert len(ids("mistral_json", cases["mistral_json"])[0]) == 9


@pytest.mark.parametrize("cut", [0, 1, 7])
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>",
            ("hm", "four", []),
        ),
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 1}<|call|>',
            ("hm", "", [ADD]),
        ),
        (' to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>', ("", "", [ADD])),
        (
            "<|channel|>commentary<|message|>I add.<|end|>"
            "<|start|>assistant to=functions.add<|message|><|call|>",
            ("", "I add.", [("add", "{}")]),
        ),
        ("<|channel|>analysis<|message|>cut", ("cut", "", [])),
        ("<|channel|>final<|message|>four", ("", "four", [])),
        ("four", ("", "four", [])),
        ("<|channel|>commentary to=functions.add<|message|>{no<|call|>", ("", "{no", [])),
    ],
)
def test_harmony(text: str, expected: Parsed, cut: int) -> None:
    style = MessageStyle("", HARMONY_FORMAT, HARMONY)
    parser = style.parser(TOOLS, "<|start|>assistant")
    assert collect(parser, text, cut) == expected
    refused = collect(style.parser(None, ""), text, cut)
    assert refused[2] == [], "without tools, a call is content"


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
        ("{{ tools }} use <tool_call>", None, False),
        ('{{ tools }} use <tool_call>{"name": f, "arguments": {}}', "hermes", False),
        ("{{ tools }}<tool_call><function=f><parameter=", "qwen_xml", False),
        ('{{ tools }}{"name": function name, "parameters": dictionary', "llama_json", False),
        ("<think>", None, True),
        (None, None, False),
        ({"default": "", "tool_use": '{{ tools }}<tool_call>"name" "arguments"'}, "hermes", False),
    ],
)
def test_a_template_tells_how_its_model_writes(template: Any, format: str | None, thinks: bool) -> None:
    style = find_style(Templated(template), "auto", "auto")
    assert (style.tool_format, style.reasoning) == (
        FORMATS[format] if format else None,
        THINK if thinks else None,
    )
    chosen = find_style(Templated(template), "qwen_xml", False)
    assert (chosen.tool_format, chosen.reasoning) == (FORMATS["qwen_xml"], None)
    assert find_style(Templated(template), None, True).tool_format is None


def test_every_call_has_an_id_of_its_own() -> None:
    parser = MessageParser(FORMATS["hermes"], TOOLS, None)
    calls = [p.call.as_message_part() for p in parser.feed(CALL * 3, True) if p.call]
    assert len({call["id"] for call in calls}) == 3
    assert json.loads(calls[0]["function"]["arguments"]) == {"a": 1}
