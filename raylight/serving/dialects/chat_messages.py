"""Chat messages as translated dialects build them; equal turns become equal messages."""

from __future__ import annotations

from typing import Any

from raylight.types.chat_messages import reasoning_of

NORMALIZED = frozenset({"role", "content", "tool_calls", "reasoning", "reasoning_content", "thinking"})
"""Fields of a message that `normalize_message` rewrites."""


def normalize_message(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's message as a later request sends it back.

    Empty fields are dropped, tool calls lose their indices, and reasoning has one name.
    """
    calls = [_normalize_call(call) for call in dicts_in(message.get("tool_calls"))]
    normal: dict[str, Any] = {
        "role": message.get("role") or "assistant",
        "content": message.get("content") or (None if calls else ""),
    }
    if reasoning := reasoning_of(message):
        normal["reasoning_content"] = reasoning
    if calls:
        normal["tool_calls"] = calls
    return normal | {name: value for name, value in message.items() if name not in NORMALIZED and value}


def _normalize_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {
        "id": call.get("id") or "",
        "type": call.get("type") or "function",
        "function": {"name": function.get("name") or "", "arguments": function.get("arguments") or ""},
    }


def tool_call(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """Return a tool call of a message. The arguments are JSON."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def text_part(text: str) -> dict[str, Any]:
    """Return a part of a message's content with text."""
    return {"type": "text", "text": text}


def image_part(url: str, detail: str = "auto") -> dict[str, Any]:
    """Return a part of a message's content with an image at a `data:` or `https:` URL."""
    chosen = {} if detail == "auto" else {"detail": detail}
    return {"type": "image_url", "image_url": {"url": url, **chosen}}


def join_parts(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Return the content of a message: texts alone are joined by newlines, which every engine takes."""
    if all(part["type"] == "text" for part in parts):
        return "\n".join(part["text"] for part in parts)
    return parts


def dicts_in(value: Any) -> list[dict[str, Any]]:
    """Return the objects in a decoded list; nothing of any other value."""
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
