"""Reading of the answer of an engine's chat or completions application, whole or streamed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from raylight.http.sse import SseReader
from raylight.serving.dialects.chat_messages import dicts_in, normalize_message

DONE = "[DONE]"
"""Data of the last event of a stream."""


@dataclass
class Choice:
    """One choice: a message of chat, or a text of completions."""

    index: int
    message: dict[str, Any] | None = None
    """The message as `normalize_message` returns it."""
    text: str | None = None
    finish_reason: str | None = None
    """None while the choice is incomplete."""


@dataclass
class Answer:
    """An engine's answer, as far as it has arrived."""

    id: str | None = None
    choices: list[Choice] = field(default_factory=list)
    """Choices in the order of their indices."""


class AnswerReader:
    """Assembles an answer while it is sent.

    Args:
        content_type: type of the answer. `text/event-stream` is read as a stream, every other one as a JSON
            object.
    """

    def __init__(self, content_type: str) -> None:
        streams = content_type.strip().lower().startswith("text/event-stream")
        self._events = SseReader() if streams else None
        self._body: list[bytes] = []
        self._id: str | None = None
        self._choices: dict[int, Choice] = {}

    def feed(self, body: bytes) -> None:
        """Read a piece of the answer, which may be cut anywhere."""
        if self._events is None:
            self._body.append(body)
            return
        for event in self._events.feed(body):
            if event.data != DONE:
                self._merge(_decode(event.data))

    def finish(self) -> Answer:
        """Return the answer. Of a broken stream it holds what arrived; of anything unreadable, nothing."""
        if self._events is None:
            answer = _decode(b"".join(self._body))
            self._id = _id_of(answer)
            self._choices = {c.index: c for c in map(_whole_choice, dicts_in(answer.get("choices")))}
        choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in choices:
            if choice.message is not None:
                choice.message = normalize_message(choice.message)
        return Answer(self._id, choices)

    def _merge(self, chunk: dict[str, Any]) -> None:
        self._id = self._id or _id_of(chunk)
        for piece in dicts_in(chunk.get("choices")):
            index = _index_of(piece)
            choice = self._choices.setdefault(index, Choice(index))
            choice.finish_reason = piece.get("finish_reason") or choice.finish_reason
            if isinstance(delta := piece.get("delta"), dict):
                choice.message = choice.message or {}
                _merge_delta(choice.message, delta)
            elif isinstance(text := piece.get("text"), str):
                choice.text = (choice.text or "") + text


def _whole_choice(choice: dict[str, Any]) -> Choice:
    message, text = choice.get("message"), choice.get("text")
    return Choice(
        _index_of(choice),
        message if isinstance(message, dict) else None,
        text if isinstance(text, str) else None,
        choice.get("finish_reason"),
    )


def _merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a message: texts are joined, tool calls merged by their index, other fields replaced."""
    for name, value in delta.items():
        if name == "tool_calls":
            for piece in dicts_in(value):
                _merge_call(message.setdefault("tool_calls", []), piece)
        elif name in ("content", "reasoning", "reasoning_content", "refusal") and isinstance(value, str):
            message[name] = (message.get(name) or "") + value
        elif value is not None:
            message[name] = value


def _merge_call(calls: list[dict[str, Any]], piece: dict[str, Any]) -> None:
    index = piece.get("index", len(calls))
    call = next((call for call in calls if call["index"] == index), None)
    if call is None:
        call = {"index": index, "function": {"name": "", "arguments": ""}}
        calls.append(call)
    for name in ("id", "type"):
        if piece.get(name):
            call[name] = piece[name]
    for name in ("name", "arguments"):
        call["function"][name] += (piece.get("function") or {}).get(name) or ""


def _decode(data: str | bytes) -> dict[str, Any]:
    """Decode a JSON object; anything else, such as an answer that was cut, becomes an empty one."""
    try:
        decoded = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _index_of(choice: dict[str, Any]) -> int:
    return index if isinstance(index := choice.get("index"), int) else 0


def _id_of(answer: dict[str, Any]) -> str | None:
    return found if isinstance(found := answer.get("id"), str) else None
