"""Text of agents and models, whose characters could lock a terminal or may have no place in UTF-8."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar, cast

Value = TypeVar("Value")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except for tabs and newlines, marks that change the direction of text, and halves of
characters."""


def printable(text: str) -> str:
    r"""Return text with its control characters as escapes, such as `\x1b`."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)


def encodable(value: Value) -> Value:
    r"""Return a value of JSON with `?` for halves of characters, which UTF-8 cannot encode: JSON that a model
    wrote may have one as `\ud83d`, and Python has them for bytes of file names."""
    changed: object = value
    if isinstance(value, str):
        changed = value.encode(errors="replace").decode()
    elif isinstance(value, Mapping):
        changed = {encodable(name): encodable(item) for name, item in value.items()}
    elif isinstance(value, list):
        changed = [encodable(item) for item in value]
    return cast(Value, changed)
