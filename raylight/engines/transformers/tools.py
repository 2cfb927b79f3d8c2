"""Tool calls in the text of a model: how they are told apart, read, and asked for."""

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
    """A call as the model wrote it; `arguments` is JSON text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")

    def message(self) -> dict[str, Any]:
        """As a chat message carries it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class ToolFormat(Protocol):
    """How a model writes tool calls."""

    open: str
    """Where a call begins; "" where the whole answer is one or more calls, or none."""
    close: str

    def read(self, block: str, tools: Mapping[str, Any]) -> list[ToolCall] | None:
        """The calls between `open` and `close`; None if there is none, and then the text is content.

        Args:
            tools: the parameters' schema of each tool by name.
        """
        ...

    def grammar(self, tools: Mapping[str, Any], required: bool, parallel: bool) -> dict[str, Any] | None:
        """The structural tag of an answer whose calls fit their schemas; None if this format has none.

        Args:
            required: the answer is calls and nothing else.
            parallel: there may be several.
        """
        ...


class Hermes:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as Hermes and Qwen write it."""

    open, close = OPEN, CLOSE

    def read(self, block: str, tools: Mapping[str, Any]) -> list[ToolCall] | None:
        call = _call(_json(block), "arguments")
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
    """`<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`, as Qwen3-Coder writes it."""

    open, close = OPEN, CLOSE
    _function = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
    _parameter = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)

    def read(self, block: str, tools: Mapping[str, Any]) -> list[ToolCall] | None:
        found = self._function.fullmatch(block)
        if found is None or self._parameter.sub("", found[2]).strip():
            return None
        schema = tools.get(found[1])
        types = schema.get("properties", {}) if isinstance(schema, Mapping) else {}
        values = {key: self._value(text, types.get(key)) for key, text in self._parameter.findall(found[2])}
        return [ToolCall(found[1], _dump(values))]

    def _value(self, text: str, schema: Any) -> Any:
        if isinstance(schema, Mapping) and schema.get("type") == "string":
            return text
        value = _json(text)
        return text if value is None and text.strip() != "null" else value

    def grammar(self, tools: Mapping[str, Any], required: bool, parallel: bool) -> dict[str, Any] | None:
        return None


class LlamaJson:
    """The whole answer is `{"name": ..., "parameters": {...}}`, or several of them with semicolons between."""

    open, close = "", ""

    def read(self, block: str, tools: Mapping[str, Any]) -> list[ToolCall] | None:
        text, calls = block.strip().removeprefix(PYTHON_TAG).strip(), []
        decoder = json.JSONDecoder(parse_constant=_refuse)
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
    """How a model with this chat template writes tool calls; None if it is not known to call tools."""
    if OPEN in template:
        return FORMATS["qwen_xml" if "<function=" in template else "hermes"]
    return FORMATS["llama_json"] if '{"name": function name, "parameters":' in template else None


def _call(value: Any, arguments: str) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = value.get(arguments)
    return ToolCall(value["name"], _dump(given)) if isinstance(given, dict) else None


def _json(text: str) -> Any:
    """The value of a JSON text; None if it is none."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _dump(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can express
        return json.dumps(value)
    return text
