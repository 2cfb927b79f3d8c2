"""Decoded JSON objects."""

from typing import Any, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""A decoded JSON object: a request, a chat message, a tool's schema, settings. Readers check its values."""


def dicts_in(value: object) -> list[JsonObject]:
    """Return the objects in a decoded list; nothing of any other value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
