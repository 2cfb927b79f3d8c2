"""Keys of conversations, from a canonical form of their messages.

A request continues a conversation if their keys are equal.

An agent sends an answer back, but not to the letter: it strips the text, drops the reasoning, reformats the
arguments of tool calls, adds keys of its own. Such a message still equals the original. Another text, or
another call, makes another message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
UNSUPPORTED_KEYS = ("audio", "function_call", "refusal")
"""Keys of an assistant message that hold content other than text and tool calls."""


class UnsupportedMessage(Exception):
    """A message without a canonical form, such as one with an image, or a value that is not a message.

    The text gives the reason.
    """


def root_key(agent: str | None, tools: Any, template_kwargs: Mapping[str, Any]) -> bytes:
    """Return the key of an empty conversation: a hash of all inputs of a chat template beside the messages.

    The model's name is not part of it: a policy may be served under a new name (the next version of its
    adapter) and continue a conversation.
    """
    return _hash(b"", [agent, tools or None, dict(template_kwargs)])


def message_keys(root: bytes, messages: Sequence[Any]) -> list[bytes]:
    """Return a key per message, which identifies the conversation up to and including that message.

    Raises:
        UnsupportedMessage: one of them is not text, or not a message.
    """
    keys: list[bytes] = []
    call_indices: dict[Any, int] = {}
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UnsupportedMessage("a message without a role")
        if message["role"] == "assistant":
            form = _canonical_answer(message)
            call_indices = {call.get("id"): i for i, call in enumerate(message.get("tool_calls") or [])}
        else:
            form = _canonical_input(message, call_indices)
        root = _hash(root, form)
        keys.append(root)
    return keys


def text_of(content: Any) -> str:
    """Return the text of a message's content, which is a string, a list of text parts, or None.

    Raises:
        UnsupportedMessage: the content is something else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UnsupportedMessage("content that is neither text nor a list of parts")
    return "\n".join(text for part in content if (text := _text_of_part(part)) is not None)


def arguments_of(arguments: Any) -> Any:
    """Decode the arguments of a tool call.

    Text that is not JSON is returned without its outer white space.
    """
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments, parse_float=_parse_number) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments.strip()


def _hash(before: bytes, form: Any) -> bytes:
    try:
        text = json.dumps(form, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:  # a lone surrogate is a ValueError too
        raise UnsupportedMessage(f"a message that cannot be encoded as JSON: {error}") from error
    return blake2b(before + text, digest_size=16).digest()


def _canonical_answer(message: Mapping[str, Any]) -> list[Any]:
    """The text and the calls of an assistant message. Reasoning and other keys do not count."""
    if unsupported := [key for key in UNSUPPORTED_KEYS if message.get(key)]:
        raise UnsupportedMessage(f"an assistant message with {unsupported[0]}")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise UnsupportedMessage("tool_calls that are not a list")
    text = _without_reasoning(text_of(message.get("content"))).strip()
    return ["assistant", text, [_canonical_call(call) for call in calls]]


def _canonical_input(message: Mapping[str, Any], call_indices: Mapping[Any, int]) -> list[Any]:
    """Any other message, with all its keys.

    A tool result names its call by index, because some agents replace call ids.
    """
    rest = {
        key: value
        for key, value in message.items()
        if key not in ("role", "content", "tool_call_id") and value
    }
    call_id = message.get("tool_call_id")
    index = call_indices.get(call_id) if isinstance(call_id, str) else None
    return [message["role"], text_of(message.get("content")).strip(), index, rest]


def _canonical_call(call: Any) -> list[Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(call.get("id"), str | None):
        raise UnsupportedMessage("a tool call that is not a function call")
    return [function.get("name"), arguments_of(function.get("arguments"))]


def _text_of_part(part: Any) -> str | None:
    """Return the text of a content part; None for reasoning."""
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise UnsupportedMessage("a content part without a type")
    if kind in REASONING_PARTS:
        return None
    if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise UnsupportedMessage(f"a content part of type {kind!r}")
    return str(part["text"])


def _without_reasoning(text: str) -> str:
    """Strip leading reasoning that no parser has removed. Its opening marker may be part of the prompt."""
    head, end, tail = text.partition("</think>")
    return tail if end and "<think>" not in head.lstrip().removeprefix("<think>") else text


def _parse_number(text: str) -> int | float:
    """Parse 1.0 as 1, because clients in languages without integers write either."""
    value = float(text)
    return int(value) if value.is_integer() else value
