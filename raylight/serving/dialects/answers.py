"""Reading of the answer of an engine's chat or completions application, whole or streamed."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

import msgspec

from raylight.http.sse import SseReader
from raylight.serving.dialects.chat_messages import dicts_in, normalize_message

DONE = "[DONE]"
"""Data of the last event of a stream."""
BATCH_BYTES = 64 * 2**10
"""Bytes of a stream that are kept until they are read together."""


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


class _Piece(msgspec.Struct):
    """The part of a choice in a chunk, as far as it is read."""

    index: Any = 0
    delta: Any = None
    text: Any = None
    finish_reason: Any = None


class _Chunk(msgspec.Struct):
    """A chunk of a streamed answer, as far as it is read; its log-probabilities are skipped."""

    id: Any = None
    choices: list[_Piece] | None = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


class AnswerReader:
    """Assembles an answer while it is sent.

    Pieces are only kept at first, so that a piece costs the stream little.

    Args:
        streams: True for a stream of events, False for a JSON object.
    """

    def __init__(self, streams: bool) -> None:
        self._events = SseReader() if streams else None
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._id: str | None = None
        self._choices: dict[int, Choice] = {}

    def feed(self, body: bytes) -> None:
        """Take a piece of the answer, which may be cut anywhere."""
        self._unread.append(body)
        self._unread_bytes += len(body)
        if self._unread_bytes > BATCH_BYTES and self._events is not None:
            self._read_events(self._events)

    def finish(self) -> Answer:
        """Return the answer. Of a broken stream it holds what arrived; of anything unreadable, nothing."""
        if self._events is not None:
            self._read_events(self._events)
        else:
            answer = _decode(b"".join(self._unread))
            self._id = _id_of(answer)
            self._choices = {c.index: c for c in map(_whole_choice, dicts_in(answer.get("choices")))}
        choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in choices:
            if choice.message is not None:
                choice.message = normalize_message(choice.message)
        return Answer(self._id, choices)

    def _read_events(self, events: SseReader) -> None:
        """Read the kept pieces of a stream."""
        for event in events.feed(b"".join(self._unread)):
            if event.data != DONE and (chunk := _decode_chunk(event.data)) is not None:
                self._merge(chunk)
        self._unread, self._unread_bytes = [], 0

    def _merge(self, chunk: _Chunk) -> None:
        if self._id is None and isinstance(chunk.id, str):
            self._id = chunk.id
        for piece in chunk.choices or ():
            index = piece.index if isinstance(piece.index, int) else 0
            choice = self._choices.get(index)
            if choice is None:
                choice = self._choices[index] = Choice(index)
            choice.finish_reason = piece.finish_reason or choice.finish_reason
            if isinstance(piece.delta, dict):
                choice.message = choice.message or {}
                _merge_delta(choice.message, piece.delta)
            elif isinstance(piece.text, str):
                choice.text = (choice.text or "") + piece.text


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


def decode_json(data: str | bytes) -> Any:
    """Decode JSON of an engine.

    Raises:
        ValueError, RecursionError: it is not JSON, or nested too deeply.
    """
    try:
        return msgspec.json.decode(data)
    except (ValueError, RecursionError):  # lone surrogates and NaN, which json reads
        return json.loads(data)


def _decode_chunk(data: str) -> _Chunk | None:
    """Decode a chunk; anything else becomes None."""
    try:
        return _CHUNKS.decode(data)
    except (ValueError, RecursionError):  # lone surrogates and NaN, which json reads
        with contextlib.suppress(ValueError, RecursionError):
            return msgspec.convert(json.loads(data), _Chunk)
    return None


def _decode(data: str | bytes) -> dict[str, Any]:
    """Decode a JSON object; anything else, such as an answer that was cut, becomes an empty one."""
    try:
        decoded = decode_json(data)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _index_of(choice: dict[str, Any]) -> int:
    return index if isinstance(index := choice.get("index"), int) else 0


def _id_of(answer: dict[str, Any]) -> str | None:
    return found if isinstance(found := answer.get("id"), str) else None
