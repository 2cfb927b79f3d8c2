"""The answer of an engine's chat or completions application, whole or in the pieces of a stream."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from raylight.http.sse import SseReader

DONE = "[DONE]"
"""The data of the last event of a stream."""


@dataclass
class Choice:
    """One choice: of chat a message, of completions a text."""

    index: int
    message: dict[str, Any] | None = None
    """The message, with `role`, `content`, and `tool_calls` and `reasoning_content` if there are any.

    `content` is None if there are tool calls alone."""
    text: str | None = None
    finish_reason: str | None = None
    """None while it is not over."""


@dataclass
class Answer:
    """What an engine answered, as far as it came."""

    id: str | None = None
    choices: list[Choice] = field(default_factory=list)
    """In the order of their indices."""


class AnswerReader:
    """Assembles an answer as it passes on the wire.

    Args:
        content_type: of the answer; `text/event-stream` is read as a stream, everything else as one JSON
            object.
    """

    def __init__(self, content_type: str) -> None:
        self._events = SseReader() if content_type.strip().lower().startswith("text/event-stream") else None
        self._body: list[bytes] = []
        self._id: str | None = None
        self._choices: dict[int, Choice] = {}

    def feed(self, body: bytes) -> None:
        if self._events is None:
            self._body.append(body)
            return
        for event in self._events.feed(body):
            if event.data != DONE:
                self._merge(_decode(event.data))

    def finish(self) -> Answer:
        """The answer. Of a broken stream it holds what came; of anything that is no answer, nothing."""
        if self._events is None:
            whole = _decode(b"".join(self._body))
            self._id = _id_of(whole)
            self._choices = {c.index: c for c in map(_whole_choice, _dicts(whole.get("choices")))}
        choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in choices:
            if choice.message is not None:
                choice.message = normalize_message(choice.message)
        return Answer(self._id, choices)

    def _merge(self, chunk: dict[str, Any]) -> None:
        self._id = self._id or _id_of(chunk)
        for piece in _dicts(chunk.get("choices")):
            index = _index_of(piece)
            choice = self._choices.setdefault(index, Choice(index))
            choice.finish_reason = piece.get("finish_reason") or choice.finish_reason
            if isinstance(delta := piece.get("delta"), dict):
                choice.message = choice.message or {}
                _merge_delta(choice.message, delta)
            elif isinstance(text := piece.get("text"), str):
                choice.text = (choice.text or "") + text


def normalize_message(message: dict[str, Any]) -> dict[str, Any]:
    """A message as it would be sent back: without what is empty, tool calls without their indices, reasoning
    under one name.
    """
    known = {"role", "content", "tool_calls", "reasoning", "reasoning_content"}
    calls = [_tidy_call(call) for call in _dicts(message.get("tool_calls"))]
    tidy: dict[str, Any] = {
        "role": message.get("role") or "assistant",
        "content": message.get("content") or (None if calls else ""),
    }
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        tidy["reasoning_content"] = reasoning
    if calls:
        tidy["tool_calls"] = calls
    return tidy | {name: value for name, value in message.items() if name not in known and value}


def _tidy_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    wanted = {"name": function.get("name") or "", "arguments": function.get("arguments") or ""}
    return {"id": call.get("id") or "", "type": call.get("type") or "function", "function": wanted}


def _whole_choice(choice: dict[str, Any]) -> Choice:
    message, text = choice.get("message"), choice.get("text")
    return Choice(
        _index_of(choice),
        message if isinstance(message, dict) else None,
        text if isinstance(text, str) else None,
        choice.get("finish_reason"),
    )


def _merge_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    """Add a delta to a message: texts are joined, tool calls are found by their index, everything else is
    replaced.
    """
    for name, value in delta.items():
        if name == "tool_calls":
            for piece in _dicts(value):
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
    """A JSON object; an empty one for what is none, such as half an answer to a client that left."""
    try:
        decoded = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _dicts(value: Any) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _index_of(choice: dict[str, Any]) -> int:
    return found if isinstance(found := choice.get("index"), int) else 0


def _id_of(answer: dict[str, Any]) -> str | None:
    return found if isinstance(found := answer.get("id"), str) else None
