"""Chat messages: what clients write in several forms, read; and messages as translated dialects build them.

Equal turns become equal messages.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from raylight.types.json_object import JsonObject, dicts_in

INVALID_JSON = "INVALID_JSON"
"""Key of a call's input for arguments that are not a JSON object; Anthropic's own."""
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")
"""Names of an answer's reasoning, in messages and in blocks of content."""

REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
"""Types of the blocks of content that are reasoning."""


def reasoning_of(message: Mapping[str, object]) -> str:
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


def is_reasoning(part: object) -> bool:
    """Return True if a part of a message's content is reasoning, readable or not."""
    return isinstance(part, Mapping) and part.get("type") in REASONING_PARTS


def reasoning_fields(reasoning: str, has_text_and_calls: bool) -> dict[str, str]:
    """Return an answer's reasoning under all names that chat templates read.

    Args:
        has_text_and_calls: True if the answer has both; gpt-oss's template raises if it has `thinking` too.
    """
    names = REASONING_NAMES[:-1] if has_text_and_calls else REASONING_NAMES
    return dict.fromkeys(names, reasoning)


def arguments_for_template(arguments: object) -> JsonObject:
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


NORMALIZED = frozenset({"role", "content", "tool_calls", "reasoning", "reasoning_content", "thinking"})
"""Fields of a message that `normalize_message` rewrites."""


def normalize_message(message: JsonObject) -> JsonObject:
    """Return an assistant's message as a later request sends it back.

    Empty fields are dropped, tool calls lose their indices, and reasoning has one name.
    """
    calls = [_normalize_call(call) for call in dicts_in(message.get("tool_calls"))]
    normal: JsonObject = {
        "role": message.get("role") or "assistant",
        "content": message.get("content") or (None if calls else ""),
    }
    if reasoning := reasoning_of(message):
        normal["reasoning_content"] = reasoning
    if calls:
        normal["tool_calls"] = calls
    return normal | {name: value for name, value in message.items() if name not in NORMALIZED and value}


def _normalize_call(call: JsonObject) -> JsonObject:
    function = call.get("function") or {}
    return {
        "id": call.get("id") or "",
        "type": call.get("type") or "function",
        "function": {"name": function.get("name") or "", "arguments": function.get("arguments") or ""},
    }


def tool_call(call_id: str, name: str, arguments: str) -> JsonObject:
    """Return a tool call of a message. The arguments are JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_part(text: str) -> JsonObject:
    return {"type": "text", "text": text}


def image_part(url: str, detail: str = "auto") -> JsonObject:
    """Return a part of a message's content with an image at a `data:` or `https:` URL."""
    chosen = {} if detail == "auto" else {"detail": detail}
    return {"type": "image_url", "image_url": {"url": url, **chosen}}


def join_parts(parts: list[JsonObject]) -> str | list[JsonObject]:
    """Return the content of a message: texts alone are joined by newlines, which every engine takes."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts
