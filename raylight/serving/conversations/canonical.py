"""What two requests must have in common for one to continue the other: the canonical form of messages.

An agent sends back what it was answered, but not to the letter: it strips the text, drops the reasoning, writes the arguments of
tool calls anew, adds keys of its own. All this is the same message still. Other text, or another call, is another message.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
REASONING_PARTS = frozenset({"thinking", "redacted_thinking", "reasoning"})
NOT_TEXT = ("audio", "function_call", "refusal")
"""What an assistant's message may be made of besides text and calls of tools; not understood here."""


class NotCanonical(Exception):
    """A message that has no canonical form, such as one with an image, or none at all; the text tells why."""


def root_key(agent: str | None, tools: Any, template_kwargs: Mapping[str, Any]) -> bytes:
    """What a conversation begins with: whatever but messages decides on how a template renders.

    The model's name is no part of it: a policy may be served under a new name, its adapter's next version, and go on talking.
    """
    return _hash(b"", [agent, tools or None, dict(template_kwargs)])


def message_keys(root: bytes, messages: Sequence[Any]) -> list[bytes]:
    """A key for each message, which stands for it and for all that came before.

    Raises:
        NotCanonical: one of them is not text, or not a message.
    """
    keys: list[bytes] = []
    calls: dict[Any, int] = {}
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise NotCanonical("a message without a role")
        if message["role"] == "assistant":
            form = _answer(message)
            calls = {call.get("id"): i for i, call in enumerate(message.get("tool_calls") or [])}
        else:
            form = _input(message, calls)
        root = _hash(root, form)
        keys.append(root)
    return keys


def text_of(content: Any) -> str:
    """The text of a message's content: a string, a list of parts of text, or nothing.

    Raises:
        NotCanonical: it is something else.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise NotCanonical("content that is neither text nor a list of parts")
    return "\n".join(text for part in content if (text := _text_of_part(part)) is not None)


def arguments_of(arguments: Any) -> Any:
    """The arguments of a tool call as data; a text that is no JSON as it is, without its outer whitespace."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments, parse_float=_number) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments.strip()


def _hash(before: bytes, form: Any) -> bytes:
    try:
        text = json.dumps(form, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    except (
        TypeError,
        ValueError,
        RecursionError,
    ) as error:  # also half of a surrogate pair, which is no text
        raise NotCanonical(f"a message that is no JSON: {error}") from error
    return blake2b(before + text, digest_size=16).digest()


def _answer(message: Mapping[str, Any]) -> list[Any]:
    """An assistant's message is its text and its calls. Other keys are remarks on it, and reasoning may be sent or not."""
    if other := [key for key in NOT_TEXT if message.get(key)]:
        raise NotCanonical(f"an assistant's message with {other[0]}")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise NotCanonical("tool_calls that are no list")
    return [
        "assistant",
        _without_thought(text_of(message.get("content"))).strip(),
        [_call(call) for call in calls],
    ]


def _input(message: Mapping[str, Any], calls: Mapping[Any, int]) -> list[Any]:
    """Any other message, with all its keys. A tool's result names its call by the call's place: ids are labels that some agents
    write anew."""
    rest = {
        key: value
        for key, value in message.items()
        if key not in ("role", "content", "tool_call_id") and value
    }
    place = calls.get(message["tool_call_id"]) if isinstance(message.get("tool_call_id"), str) else None
    return [message["role"], text_of(message.get("content")).strip(), place, rest]


def _call(call: Any) -> list[Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(call.get("id"), str | None):
        raise NotCanonical("a tool call that is not of a function")
    return [function.get("name"), arguments_of(function.get("arguments"))]


def _text_of_part(part: Any) -> str | None:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(kind, str):
        raise NotCanonical("a part of content without a type")
    if kind in REASONING_PARTS:
        return None
    if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise NotCanonical(f"a part of content of the type {kind!r}")
    return str(part["text"])


def _without_thought(text: str) -> str:
    """Text of an answer without the thought that it begins with, where no parser took that out; it may have begun in the prompt."""
    head, end, tail = text.partition("</think>")
    return tail if end and "<think>" not in head.lstrip().removeprefix("<think>") else text


def _number(text: str) -> int | float:
    """Some languages know no other numbers than floats, and write 1.0 as 1."""
    value = float(text)
    return int(value) if value.is_integer() else value
