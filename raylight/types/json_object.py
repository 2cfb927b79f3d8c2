"""Decoded JSON objects."""

import json
import math
from typing import Any, NoReturn, TypeAlias

JsonObject: TypeAlias = dict[str, Any]
"""A decoded JSON object: a request, a chat message, a tool's schema, settings. Readers check its values."""
Message: TypeAlias = JsonObject
"""A chat message in OpenAI's shape: `role`, `content`, and optionally `tool_calls`, `tool_call_id`,
`name`."""


def dicts_in(value: object) -> list[JsonObject]:
    """Return the objects in a decoded list; nothing of any other value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def parse_json(text: str) -> object:
    """Decode JSON text; None if it is invalid, or has a number that is not finite."""
    try:
        return json.loads(text, parse_constant=_reject, parse_float=_finite)
    except (ValueError, RecursionError):
        return None


def _finite(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _reject(digits)


def _reject(number: str) -> NoReturn:
    raise ValueError(f"{number} is not a finite number")
