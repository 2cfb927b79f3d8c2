"""Readings of chat messages that clients write in several forms: reasoning, and arguments of tool calls."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

INVALID_JSON = "INVALID_JSON"
"""Key of a call's input for arguments that are not a JSON object; Anthropic's own."""
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names of an answer's reasoning, in messages and in blocks of content."""

REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Types of the blocks of content that are reasoning."""


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return the reasoning of an answer: a field of the message, or its blocks of thinking; "" if none."""
    for name in REASONING_NAMES:
        if isinstance(text := message.get(name), str) and text:
            return text
    content = message.get("content")
    blocks = content if isinstance(content, list | tuple) else ()
    texts = [
        text
        for block in blocks
        if is_reasoning(block)
        for name in (*REASONING_NAMES, "text")
        if isinstance(text := block.get(name), str)
    ]
    return "\n".join(texts)


def is_reasoning(part: Any) -> bool:
    """Return True if a part of a message's content is reasoning, readable or not."""
    return isinstance(part, Mapping) and part.get("type") in REASONING_PARTS


def reasoning_fields(reasoning: str, has_text_and_calls: bool) -> dict[str, str]:
    """Return an answer's reasoning under all names that chat templates read.

    Args:
        has_text_and_calls: True if the answer has both; gpt-oss's template raises if it has `thinking` too.
    """
    names = REASONING_NAMES[:-1] if has_text_and_calls else REASONING_NAMES
    return dict.fromkeys(names, reasoning)


def arguments_for_template(arguments: Any) -> dict[str, Any]:
    """Return the arguments of an earlier tool call as the mapping that chat templates take.

    Arguments that are not a JSON object, such as cut-off text, a list or a number, are shown as text, so that
    one malformed call of an earlier turn, or of another model, does not end the conversation.
    """
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else None
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {INVALID_JSON: text}
