"""Decoded JSON objects."""

from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""A decoded JSON object: a request, a chat message, a tool's schema, settings. Readers check its values."""
Message: TypeAlias = JsonObject
"""A chat message in OpenAI's shape: `role`, `content`, and optionally `tool_calls`, `tool_call_id`,
`name`."""


def dicts_in(value: object) -> list[JsonObject]:
    """Return the objects in a decoded list; nothing of any other value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
