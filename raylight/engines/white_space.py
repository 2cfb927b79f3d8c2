"""Limit of white space in JSON that a grammar constrains, in both engines.

A grammar of JSON allows any amount of white space between its parts. A small model may then write nothing
else, up to its limit of tokens, and its answers never parse.
"""

from __future__ import annotations

from typing import Any

MAX_WHITE_SPACE = 16
"""Most characters of white space in a row."""


def limit_white_space(structure: Any) -> Any:
    """Return a structural tag of xgrammar whose JSON parts have limited white space.

    A limit that a part has already is kept.
    """
    if isinstance(structure, list):
        return [limit_white_space(part) for part in structure]
    if not isinstance(structure, dict):
        return structure
    if structure.get("type") == "json_schema":  # the schema itself is no structure
        given = structure.get("max_whitespace_cnt")
        return structure | {"max_whitespace_cnt": MAX_WHITE_SPACE if given is None else given}
    return {key: limit_white_space(part) for key, part in structure.items()}
