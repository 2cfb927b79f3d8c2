"""Formats of tool calls in a model's text: parsing, and grammars."""

from __future__ import annotations

import ast
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from raylight.engines.transformers.schema_values import typed_value
from raylight.types import JsonObject
from raylight.types.json_object import parse_json

PYTHON_TAG = "<|python_tag|>"
PYTHON_NAMES = {"true": True, "false": False, "null": None}
"""JSON's words, which models write in calls of Python too."""
PieceKind = Literal["reasoning", "content", "call"]


def new_id() -> str:
    return f"call_{uuid.uuid4().hex}"


def short_id() -> str:
    """Return a call id as Mistral's templates demand it."""
    return uuid.uuid4().hex[:9]


@dataclass(frozen=True)
class ToolCall:
    """A tool call by the model; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=new_id)

    def as_message_part(self) -> JsonObject:
        """Return the call as an entry of a chat message's `tool_calls`."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass(frozen=True)
class MessagePiece:
    """A part of a message."""

    kind: PieceKind
    text: str = ""
    call: ToolCall | None = None


class ToolFormat(Protocol):
    """A model's notation of tool calls.

    Attributes:
        open: marker before calls; "" if an answer is either calls only or no call.
        close: marker after calls; "" if they go to the end of the answer.
        texts: texts with all markers, which stay in the answer even if they are special tokens.
    """

    @property
    def open(self) -> str: ...

    @property
    def close(self) -> str: ...

    @property
    def texts(self) -> tuple[str, ...]: ...

    def read(self, block: str, tools: Mapping[str, object]) -> list[ToolCall] | None:
        """Parse the text between `open` and `close`; returns None if it is not a call, and so content.

        Args:
            tools: tool name to the schema of its parameters.
        """
        ...

    def grammar(self, tools: Mapping[str, object], required: bool, parallel: bool) -> JsonObject | None:
        """Return the structural tag of an answer whose calls fit their schemas; None if not supported.

        Args:
            tools: tool name to the schema of its parameters.
            required: True if the answer must consist of calls.
            parallel: True if several calls are allowed.
        """
        ...


@dataclass(frozen=True)
class CallTag:
    """Text around the arguments of a call, by which xgrammar constrains it.

    Attributes:
        begin: text before the arguments; %s stands for the tool's name, %j for its name in JSON.
        end: text after the arguments.
        style: xgrammar's name of the arguments' notation.
        section: text around all calls, if there is such.
        separator: text between two calls.
    """

    begin: str
    end: str
    style: str = "json"
    section: tuple[str, str] | None = None
    separator: str = "\n"


@dataclass(frozen=True)
class Markers:
    """A notation between two markers."""

    open: str
    close: str
    others: tuple[str, ...] = ()
    """Other markers within."""
    tag: CallTag | None = field(default=None, kw_only=True)
    """None: calls cannot be constrained."""

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.open, self.close, *self.others)

    def grammar(self, tools: Mapping[str, object], required: bool, parallel: bool) -> JsonObject | None:
        if (tag := self.tag) is None:
            return None
        tags = [
            {
                "type": "tag",
                "begin": tag.begin.replace("%j", json.dumps(name)).replace("%s", name),
                "content": {"type": "json_schema", "json_schema": schema, "style": tag.style},
                "end": tag.end,
            }
            for name, schema in tools.items()
        ]
        calls: JsonObject = {
            "type": "tags_with_separator",
            "tags": tags,
            "separator": tag.separator,
            "at_least_one": True,
            "stop_after_first": not parallel,
        }
        if tag.section is not None:
            calls = {"type": "tag", "begin": tag.section[0], "content": calls, "end": tag.section[1]}
            tags, parallel = [calls], False  # a section, with all calls, occurs once
        if required:
            return calls
        return {
            "type": "triggered_tags",
            "triggers": [self.open],
            "tags": tags,
            "stop_after_first": not parallel,
        }


@dataclass(frozen=True)
class JsonCalls(Markers):
    """A JSON object, or a list of them, as in `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`."""

    name: str = "name"
    arguments: str = "arguments"
    short_ids: bool = False

    def read(self, block: str, tools: Mapping[str, object]) -> list[ToolCall] | None:
        value = parse_json(block)
        calls = [self._call(one) for one in (value if isinstance(value, list) else [value])]
        found = [call for call in calls if call is not None]
        return found if found and len(found) == len(calls) else None  # one bad part: all is content

    def _call(self, value: object) -> ToolCall | None:
        if not isinstance(value, dict) or not isinstance(value.get(self.name), str):
            return None
        values = value.get(self.arguments)
        if not isinstance(values, dict):
            return None
        return ToolCall(value[self.name], _dump(values), short_id() if self.short_ids else new_id())


@dataclass(frozen=True)
class LlamaJson(JsonCalls):
    """The whole answer is one or more `{"name": ..., "parameters": {...}}`, separated by semicolons."""

    def read(self, block: str, tools: Mapping[str, object]) -> list[ToolCall] | None:
        text, calls = block.strip().removeprefix(PYTHON_TAG).strip(), []
        decoder = json.JSONDecoder()
        while text:
            try:
                _, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return None
            call = self._call(parse_json(text[:end]))
            if call is None:
                return None
            calls.append(call)
            text = text[end:].lstrip().removeprefix(";").lstrip()
        return calls or None

    def grammar(self, tools: Mapping[str, object], required: bool, parallel: bool) -> JsonObject | None:
        if not required:
            return None
        calls = [
            {
                "type": "object",
                "required": ["name", "parameters"],
                "additionalProperties": False,
                "properties": {"name": {"const": name}, "parameters": schema},
            }
            for name, schema in tools.items()
        ]
        return {"type": "json_schema", "json_schema": {"anyOf": calls}}


@dataclass(frozen=True)
class NamedCalls(Markers):
    """Calls of a name, followed by its arguments in JSON.

    Attributes:
        call: pattern of a call, with the groups `name` and `arguments`, and optionally `id`.
    """

    call: str = ""
    short_ids: bool = False

    def read(self, block: str, tools: Mapping[str, object]) -> list[ToolCall] | None:
        pattern = re.compile(self.call, re.DOTALL)
        if pattern.sub("", block).strip():
            return None
        calls = []
        for match in pattern.finditer(block):
            values = parse_json(match["arguments"]) if match["arguments"].strip() else {}
            if not isinstance(values, dict):
                return None
            call_id = match.groupdict().get("id") or (short_id() if self.short_ids else new_id())
            calls.append(ToolCall(match["name"].strip(), _dump(values), call_id))
        return calls or None


@dataclass(frozen=True)
class XmlCalls(Markers):
    """Calls whose parameters have a tag each, with values as plain text, typed by the tool's schema.

    Attributes:
        call: pattern of a call, with the groups `name` and `body`.
        parameter: pattern of a parameter in the body, with the groups `key` and `value`, and optionally
            `string`, which is "true" for text and "false" for JSON.
    """

    call: str = ""
    parameter: str = ""

    def read(self, block: str, tools: Mapping[str, object]) -> list[ToolCall] | None:
        pattern = re.compile(self.call, re.DOTALL)
        if pattern.sub("", block).strip():
            return None
        calls = [self._call(match["name"].strip(), match["body"], tools) for match in pattern.finditer(block)]
        return [call for call in calls if call] if calls and all(calls) else None

    def _call(self, name: str, body: str, tools: Mapping[str, object]) -> ToolCall | None:
        pattern = re.compile(self.parameter, re.DOTALL)
        if pattern.sub("", body).strip():
            return None
        schema = tools.get(name)
        schema = schema if isinstance(schema, Mapping) else {}
        properties = schema.get("properties")
        properties = properties if isinstance(properties, Mapping) else {}
        values = {}
        for match in pattern.finditer(body):
            key, text = match["key"].strip(), match["value"]
            is_text = "string" in pattern.groupindex and match["string"] == "true"
            values[key] = text if is_text else typed_value(text, properties.get(key), schema)
        return ToolCall(name, _dump(values))


@dataclass(frozen=True)
class PythonCalls(Markers):
    """Calls as Python writes them, in a list or on a line each: `[add(a=1), sub(a=2)]`."""

    def read(self, block: str, tools: Mapping[str, object]) -> list[ToolCall] | None:
        try:
            parsed = ast.parse(block.strip()).body
            expressions = [statement.value for statement in parsed if isinstance(statement, ast.Expr)]
            if len(expressions) == 1 and isinstance(expressions[0], ast.List):
                expressions = list(expressions[0].elts)
            calls = [_python_call(node) for node in expressions]
            return calls if calls and len(expressions) >= len(parsed) else None  # else other statements
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None


@dataclass(frozen=True)
class GemmaCalls(Markers):
    """`call:name{key:<|"|>text<|"|>,other:1}`, as Gemma 4 writes it."""

    def read(self, block: str, tools: Mapping[str, object]) -> list[ToolCall] | None:
        match = re.fullmatch(r"\s*call:([^{\s]+)\s*(\{.*\})\s*", block, re.DOTALL)
        if match is None:
            return None
        parts = match[2].split('<|"|>')
        for index, part in enumerate(parts):
            is_text = index % 2  # odd parts are between two quotes
            keys = re.sub(r"([{,]\s*)([^\s{}\[\],:\"]+)\s*:", lambda m: f"{m[1]}{json.dumps(m[2])}:", part)
            parts[index] = json.dumps(part) if is_text else keys
        values = parse_json("".join(parts))
        return [ToolCall(match[1], _dump(values))] if isinstance(values, dict) else None


FUNCTION = (  # a value may contain </function>
    r"\s*<function=(?P<name>[^>\n]+)>(?P<body>\s*(?:<parameter=[^>\n]+>.*?</parameter>\s*)*)</function>\s*"
)
PARAMETER = r"\s*<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>\s*"
DSML_CALL = r'\s*<｜DSML｜invoke name="(?P<name>[^"]+)">(?P<body>.*?)</｜DSML｜invoke>\s*'
DSML_PARAMETER = (
    r'\s*<｜DSML｜parameter name="(?P<key>[^"]+)" string="(?P<string>true|false)">'
    r"(?P<value>.*?)</｜DSML｜parameter>\s*"
)
FORMATS: dict[str, ToolFormat] = {
    "hermes": JsonCalls(
        "<tool_call>",
        "</tool_call>",
        tag=CallTag('<tool_call>\n{"name": %j, "arguments": ', "}\n</tool_call>"),
    ),
    "qwen_xml": XmlCalls(
        "<tool_call>",
        "</tool_call>",
        call=FUNCTION,
        parameter=PARAMETER,
        tag=CallTag("<tool_call>\n<function=%s>\n", "\n</function>\n</tool_call>", "qwen_xml"),
    ),
    "seed_xml": XmlCalls(
        "<seed:tool_call>",
        "</seed:tool_call>",
        call=FUNCTION,
        parameter=PARAMETER,
        tag=CallTag("<seed:tool_call>\n<function=%s>\n", "\n</function>\n</seed:tool_call>", "qwen_xml"),
    ),
    "glm": XmlCalls(
        "<tool_call>",
        "</tool_call>",
        call=r"\s*(?P<name>[\w.:/-]+)\s*(?P<body>(?:<arg_key>.*)?)\Z",
        parameter=r"\s*<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>\n?(?P<value>.*?)\n?</arg_value>\s*",
        tag=CallTag("<tool_call>%s\n", "\n</tool_call>", "glm_xml"),
    ),
    "minimax_m2": XmlCalls(
        "<minimax:tool_call>",
        "</minimax:tool_call>",
        call=r'\s*<invoke name="(?P<name>[^"]+)">(?P<body>.*?)</invoke>\s*',
        parameter=r'\s*<parameter name="(?P<key>[^"]+)">\n?(?P<value>.*?)\n?</parameter>\s*',
        tag=CallTag(
            '<invoke name="%s">\n',
            "</invoke>\n",
            "minimax_xml",
            ("<minimax:tool_call>\n", "</minimax:tool_call>"),
            "",
        ),
    ),
    "deepseek_v32": XmlCalls(
        "<｜DSML｜function_calls>",
        "</｜DSML｜function_calls>",
        ("｜DSML｜",),
        DSML_CALL,
        DSML_PARAMETER,
        tag=CallTag(
            '<｜DSML｜invoke name="%s">\n',
            "</｜DSML｜invoke>\n",
            "deepseek_xml",
            ("<｜DSML｜function_calls>\n", "</｜DSML｜function_calls>"),
            "",
        ),
    ),
    "deepseek_v4": XmlCalls(
        "<｜DSML｜tool_calls>",
        "</｜DSML｜tool_calls>",
        ("｜DSML｜",),
        DSML_CALL,
        DSML_PARAMETER,
        tag=CallTag(
            '<｜DSML｜invoke name="%s">\n',
            "</｜DSML｜invoke>\n",
            "deepseek_xml",
            ("<｜DSML｜tool_calls>\n", "</｜DSML｜tool_calls>"),
            "",
        ),
    ),
    "deepseek_v3": NamedCalls(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        r"\s*<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?P<arguments>.*?)\n```"
        r"<｜tool▁call▁end｜>\s*",
        tag=CallTag(
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>%s\n```json\n",
            "\n```<｜tool▁call▁end｜>",
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
    ),
    "deepseek_v31": NamedCalls(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        ("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        r"\s*<｜tool▁call▁begin｜>(?P<name>.+?)<｜tool▁sep｜>(?P<arguments>.*?)<｜tool▁call▁end｜>\s*",
        tag=CallTag(
            "<｜tool▁call▁begin｜>%s<｜tool▁sep｜>",
            "<｜tool▁call▁end｜>",
            section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
            separator="",
        ),
    ),
    "kimi_k2": NamedCalls(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        ("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*"
        r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>\s*",
    ),
    "mistral_args": NamedCalls(
        "[TOOL_CALLS]",
        "",
        ("[CALL_ID]", "[ARGS]"),
        r"(?:\[TOOL_CALLS\])?\s*(?P<name>[^\[\]\s{}]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\](?P<arguments>.*?)"
        r"(?=\[TOOL_CALLS\]|\Z)",
        short_ids=True,
        tag=CallTag("[TOOL_CALLS]%s[ARGS]", "", separator=""),
    ),
    "mistral_json": JsonCalls("[TOOL_CALLS]", "", short_ids=True),
    "cohere": JsonCalls("<|START_ACTION|>", "<|END_ACTION|>", name="tool_name", arguments="parameters"),
    "nemotron_json": JsonCalls("<TOOLCALL>", "</TOOLCALL>"),
    "granite": JsonCalls("<|tool_call|>", ""),
    "functools": JsonCalls("functools", ""),
    "phi4_mini": JsonCalls("<|tool_call|>", "<|/tool_call|>"),
    "gemma4": GemmaCalls("<|tool_call>", "<tool_call|>", ('<|"|>',)),
    "lfm2": PythonCalls("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": PythonCalls("<function_calls>", "</function_calls>"),
    "llama_json": LlamaJson("", "", (PYTHON_TAG,), arguments="parameters"),
}
"""Notation of tool calls -> its format; `families.FAMILIES` says which model has which."""


def _python_call(node: ast.expr) -> ToolCall:
    """Read a call of Python.

    Raises:
        ValueError: it is none, or has arguments that are not values with names.
    """
    if not isinstance(node, ast.Call) or node.args or not all(keyword.arg for keyword in node.keywords):
        raise ValueError("no call with named arguments")
    values = {
        str(keyword.arg): ast.literal_eval(_JsonWords().visit(keyword.value)) for keyword in node.keywords
    }
    return ToolCall(ast.unparse(node.func), _dump(values))


class _JsonWords(ast.NodeTransformer):
    """Replaces JSON's words by Python's, which `literal_eval` reads."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Constant(PYTHON_NAMES[node.id]) if node.id in PYTHON_NAMES else node


def _dump(value: object) -> str:
    """Encode arguments as JSON.

    Raises:
        ValueError: a number is not finite.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate can only be written as an escape
        return json.dumps(value)
    return text
