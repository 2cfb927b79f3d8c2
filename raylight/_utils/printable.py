"""Text of agents and models on terminals, whose control sequences could retitle, clear or lock them."""

from __future__ import annotations

import re

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except for tabs and newlines, marks that change the direction of text, and halves of
characters."""


def printable(text: str) -> str:
    r"""Return text with its control characters as escapes, such as `\x1b`."""
    return _CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)
