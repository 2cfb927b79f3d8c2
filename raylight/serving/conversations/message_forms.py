"""Canonical forms of messages, by which a request's messages are compared with stored conversations.

An agent sends an answer back, but not to the letter: it strips the text, drops the reasoning, reformats the
arguments of tool calls, adds keys. Such a message has the same form as the original. Another text,
or another call, makes another form.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from raylight.images.messages import image_url_of, recorded_digest
from raylight.types.chat_messages import is_reasoning

TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
UNSUPPORTED_KEYS = ("audio", "function_call", "refusal")
"""Keys of an assistant message that hold content other than text and tool calls."""


class UnsupportedMessage(Exception):
    """A message without a canonical form, such as one with audio, or a value that is not a message.

    The text gives the reason.
    """


@dataclass(frozen=True, slots=True, eq=False)
class MessageForm:
    """The canonical form of a message. Two messages are equal if their digests are."""

    role: str
    text: str
    """Text without outer white space and, in an answer, without reasoning."""
    calls: Sequence[list[Any]]
    """Name and decoded arguments of each tool call of an answer."""
    others: Sequence[Any]
    """Other content of a message that is not an answer: the index of the tool call that it answers, because
    some agents replace call ids, and its other keys; empty if there is none."""
    images: Sequence[list[Any]] = ()
    """Digest of each image, and number of characters before it, without white space."""
    digest: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "digest", self._digest_with(self.text))

    @property
    def is_answer(self) -> bool:
        """True for a message of the assistant, sampled or not."""
        return self.role == "assistant"

    def loose_digest(self) -> bytes:
        """Return a digest that does not depend on white space in the text."""
        return self._digest_with(collapse(self.text))

    def _digest_with(self, text: str) -> bytes:
        images = [self.images] if self.images else []
        return digest_of([self.role, text, self.calls, self.others, *images])


def digest_of(value: object) -> bytes:
    """Return a hash of a JSON value that does not depend on the order of keys.

    Raises:
        UnsupportedMessage: it cannot be encoded as JSON.
    """
    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
    except (TypeError, ValueError, RecursionError) as error:  # a lone surrogate is a ValueError too
        raise UnsupportedMessage(f"a message that cannot be encoded as JSON: {error}") from error
    return blake2b(text, digest_size=16).digest()


def message_forms(messages: Sequence[object]) -> list[MessageForm]:
    """Return the canonical forms of a conversation's messages.

    Raises:
        UnsupportedMessage: one of them has other content than text and images, or is not a message.
    """
    forms: list[MessageForm] = []
    call_indices: dict[object, int] = {}
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UnsupportedMessage("a message without a role")
        if message["role"] == "assistant":
            forms.append(answer_form(message))
            call_indices = {call.get("id"): i for i, call in enumerate(message.get("tool_calls") or [])}
        else:
            forms.append(_input_form(message, call_indices))
    return forms


def answer_form(message: Mapping[str, object]) -> MessageForm:
    """Return the form of an assistant message: its text and calls. Reasoning and other keys do not count.

    Raises:
        UnsupportedMessage: it has content of another kind.
    """
    if unsupported := [key for key in UNSUPPORTED_KEYS if message.get(key)]:
        raise UnsupportedMessage(f"an assistant message with {unsupported[0]}")
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list):
        raise UnsupportedMessage("tool_calls that are not a list")
    text = without_reasoning(text_of(message.get("content"))).strip()
    return MessageForm("assistant", text, [_canonical_call(call) for call in calls] if calls else (), ())


def collapse(text: str) -> str:
    """Return a text with single spaces in place of its white space, and none at its ends."""
    return " ".join(text.split())


def text_of(content: object) -> str:
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


def arguments_of(arguments: object) -> object:
    """Decode the arguments of a tool call.

    Text that is not JSON is returned without its outer white space.
    """
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments, parse_float=_parse_number) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments.strip()


def _input_form(message: Mapping[str, Any], call_indices: Mapping[object, int]) -> MessageForm:
    rest = {
        key: value
        for key, value in message.items()
        if key not in ("role", "content", "tool_call_id") and value
    }
    call_id = message.get("tool_call_id")
    index = call_indices.get(call_id) if isinstance(call_id, str) else None
    others = (index, rest) if rest or index is not None else ()
    text, images = _content_of(message.get("content"))
    return MessageForm(message["role"], text.strip(), (), others, images)


def _content_of(content: object) -> tuple[str, Sequence[list[object]]]:
    """Return the text of a message's content, and its images as `MessageForm.images` has them.

    Raises:
        UnsupportedMessage: it has other content.
    """
    if not isinstance(content, list) or not any(image_url_of(part) is not None for part in content):
        return text_of(content), ()
    texts: list[object] = []
    images: list[list[object]] = []
    for part in content:
        if (url := image_url_of(part)) is None:
            texts.append(part)
        elif (sha256 := recorded_digest(url)) is not None:
            images.append([sha256, len("".join(text_of(texts).split()))])
        else:
            raise UnsupportedMessage("an image at a URL that only the model's provider reads")
    return text_of(texts), images


def _canonical_call(call: Any) -> list[object]:
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
    if is_reasoning(part):
        return None
    if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
        raise UnsupportedMessage(f"a content part of type {kind!r}")
    return str(part["text"])


def without_reasoning(text: str) -> str:
    """Strip leading reasoning that no parser has removed. Its opening marker may be part of the prompt."""
    head, end, tail = text.partition("</think>")
    return tail if end and "<think>" not in head.lstrip().removeprefix("<think>") else text


def _parse_number(text: str) -> int | float:
    """Parse 1.0 as 1, because clients in languages without integers write either."""
    value = float(text)
    return int(value) if value.is_integer() else value
