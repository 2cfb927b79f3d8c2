"""Formats of tool calls in a model's text: detection, parsing, and grammars."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol

ToolParserName = Literal["hermes", "qwen_xml", "llama_json"]
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"


@dataclass(frozen=True)
class ToolCall:
    """A tool call by the model; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")

    def as_message_part(self) -> dict[str, Any]:
        """Return the call as an entry of a chat message's `tool_calls`."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class ToolFormat(Protocol):
    """A model's notation of tool calls."""

    open: str
    """Marker before a call; "" if an answer is either calls only or no call."""
    close: str
    """Marker after a call."""

    def read(self, block: str, tools: Mapping[str, Any]) -> list[ToolCall] | None:
        """Parse the text between `open` and `close`; returns None if it is not a call, and so content.

        Args:
            tools: tool name to the schema of its parameters.
        """
        ...

    def grammar(self, tools: Mapping[str, Any], required: bool, parallel: bool) -> dict[str, Any] | None:
        """Return the structural tag of an answer whose calls fit their schemas; None if not supported.

        Args:
            tools: tool name to the schema of its parameters.
            required: True if the answer must consist of calls.
            parallel: True if several calls are allowed.
        """
        ...


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write it."""

    open, close = OPEN, CLOSE

    def read(self, block: str, tools: Mapping[str, Any]) -> list[ToolCall] | None:
        call = _call(_parse_json(block), "arguments")
        return [call] if call else None

    def grammar(self, tools: Mapping[str, Any], required: bool, parallel: bool) -> dict[str, Any] | None:
        tags = [
            {
                "type": "tag",
                "begin": f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": ',
                "content": {"type": "json_schema", "json_schema": schema},
                "end": f"}}\n{CLOSE}",
            }
            for name, schema in tools.items()
        ]
        if required:
            one = {"type": "tags_with_separator", "tags": tags, "separator": "\n", "at_least_one": True}
            return {**one, "stop_after_first": not parallel}
        return {"type": "triggered_tags", "triggers": [OPEN], "tags": tags, "stop_after_first": not parallel}


class QwenXml:
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>` (Qwen3-Coder)."""

    open, close = OPEN, CLOSE
    _function = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
    _parameter = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)

    def read(self, block: str, tools: Mapping[str, Any]) -> list[ToolCall] | None:
        match = self._function.fullmatch(block)
        if match is None or self._parameter.sub("", match[2]).strip():
            return None
        schema = tools.get(match[1])
        types = schema.get("properties", {}) if isinstance(schema, Mapping) else {}
        values = {key: self._value(text, types.get(key)) for key, text in self._parameter.findall(match[2])}
        return [ToolCall(match[1], _dump(values))]

    def _value(self, text: str, schema: Any) -> Any:
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            return text
        value = _parse_json(text)
        return text if value is None and text.strip() != "null" else value

    def grammar(self, tools: Mapping[str, Any], required: bool, parallel: bool) -> dict[str, Any] | None:
        return None


class LlamaJson:
    """The whole answer is one or more `{"name": ..., "parameters": {...}}`, separated by semicolons."""

    open, close = "", ""

    def read(self, block: str, tools: Mapping[str, Any]) -> list[ToolCall] | None:
        text, calls = block.strip().removeprefix(PYTHON_TAG).strip(), []
        decoder = json.JSONDecoder(parse_constant=_reject_constant)
        while text:
            try:
                value, end = decoder.raw_decode(text)
            except (ValueError, RecursionError):
                return None
            call = _call(value, "parameters")
            if call is None:
                return None
            calls.append(call)
            text = text[end:].lstrip().removeprefix(";").lstrip()
        return calls or None

    def grammar(self, tools: Mapping[str, Any], required: bool, parallel: bool) -> dict[str, Any] | None:
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


FORMATS: dict[ToolParserName, ToolFormat] = {
    "hermes": Hermes(),
    "qwen_xml": QwenXml(),
    "llama_json": LlamaJson(),
}


def find_format(template: str) -> ToolFormat | None:
    """Detect the format from a chat template; None if the template is not known to support tools."""
    if OPEN in template:
        return FORMATS["qwen_xml" if "<function=" in template else "hermes"]
    return FORMATS["llama_json"] if '{"name": function name, "parameters":' in template else None


def _call(value: Any, arguments: str) -> ToolCall | None:
    """Read a call from decoded JSON; `arguments` is the key of its arguments."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    values = value.get(arguments)
    return ToolCall(value["name"], _dump(values)) if isinstance(values, dict) else None


def _parse_json(text: str) -> Any:
    """Decode JSON text; None if it is invalid."""
    try:
        return json.loads(text, parse_constant=_reject_constant)
    except (ValueError, RecursionError):
        return None


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _dump(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a lone surrogate can only be written as an escape
        return json.dumps(value)
    return text
