"""Text of OpenEnv's environments: actions from a model's answers, and observations for it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

TOOL_ACTIONS = ("tool_name", "list_tools")
"""Words in the schema of actions of environments whose actions are calls of MCP tools."""


def is_tool_schema(schema: Mapping[str, Any]) -> bool:
    """Return True if actions of this JSON schema are calls of MCP tools."""
    return any(word in json.dumps(schema) for word in TOOL_ACTIONS) or set(fields_of(schema)) == set()


def fields_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties of an action's JSON schema, without its metadata."""
    return {name: kind for name, kind in schema.get("properties", {}).items() if name != "metadata"}


def action_parser(schema: Mapping[str, Any]) -> Callable[[str], dict[str, Any]]:
    """Return a function that makes an action of a JSON schema from the model's answer."""
    fields = fields_of(schema)
    required = [name for name in schema.get("required", fields) if name in fields] or list(fields)

    def parse(text: str) -> dict[str, Any]:
        if len(required) == 1:
            (name,) = required
            kind = fields[name].get("type")
            return {name: text if kind in ("string", None) else read_json(text, kind)}
        return read_json(text, f"object with {', '.join(required)}", dict)

    return parse


def read_json(text: str, what: str, expected: type = object) -> Any:
    """Return the value of a JSON text; a ValueError with a message for the model if it has none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if value is None or not isinstance(value, expected):
        raise ValueError(f"answer with JSON: {what}")
    return value


def observation_text(observation: dict[str, Any]) -> str:
    """Return an observation as text: the value of its only field, or all as JSON, without the metadata."""
    fields = {name: value for name, value in observation.items() if name != "metadata"}
    values = list(fields.values())
    return values[0] if len(values) == 1 and isinstance(values[0], str) else json.dumps(fields)


def tool_text(result: Any) -> str:
    """Return the result of a tool as text."""
    if isinstance(result, dict) and "data" in result:  # the result of fastmcp
        result = result["data"]
    return result if isinstance(result, str) else json.dumps(result)
