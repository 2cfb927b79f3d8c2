"""Reading of the answer of an engine's chat or completions application, whole or streamed.

Capture reads it as choices. Translated dialects read it as a turn of blocks: reasoning, text and tool calls,
in their order. A turn is one choice. Blocks never overlap: text between the pieces of a call follows it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from raylight.http.errors import RequestError
from raylight.http.sse import SseReader
from raylight.types import JsonObject
from raylight.types.chat_messages import normalize_message, tool_call
from raylight.types.json_object import dicts_in

DONE = "[DONE]"
"""Data of the last event of a stream. Clients may continue before the stream's end."""
BATCH_BYTES = 64 * 2**10
"""Bytes of a stream that are kept until they are read together."""


@dataclass
class Choice:
    """One choice: a message of chat, or a text of completions."""

    index: int
    message: JsonObject | None = None
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
    delta: object = None
    text: Any = None
    finish_reason: Any = None


class _Chunk(msgspec.Struct):
    """A chunk of a streamed answer, as far as it is read; its log-probabilities are skipped."""

    id: object = None
    choices: list[_Piece] | None = None


_CHUNKS = msgspec.json.Decoder(_Chunk)


class AnswerReader:
    """Assembles an answer while it is sent.

    Pieces are only kept at first, so that a piece costs the stream little.

    Args:
        streams: True for a stream of events, False for a JSON object.

    Attributes:
        done: True once the last event of a stream has arrived.
    """

    def __init__(self, streams: bool) -> None:
        self.done = self._may_be_done = False
        self._events = SseReader() if streams else None
        self._unread: list[bytes] = []
        self._unread_bytes = 0
        self._id: str | None = None
        self._choices: dict[int, Choice] = {}

    def feed(self, body: bytes) -> None:
        """Take a piece of the answer, which may be cut anywhere."""
        self._unread.append(body)
        self._unread_bytes += len(body)
        self._may_be_done = self._may_be_done or DONE.encode() in body  # an answer may quote it
        if self._events is not None and (self._may_be_done or self._unread_bytes > BATCH_BYTES):
            self._read_events(self._events)

    def finish(self) -> Answer:
        """Return the answer: of a broken stream the part that arrived, of anything unreadable nothing."""
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
            if event.data == DONE:
                self.done = True
            elif (chunk := _decode_chunk(event.data)) is not None:
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


def _whole_choice(choice: JsonObject) -> Choice:
    message, text = choice.get("message"), choice.get("text")
    return Choice(
        _index_of(choice),
        message if isinstance(message, dict) else None,
        text if isinstance(text, str) else None,
        choice.get("finish_reason"),
    )


def _merge_delta(message: JsonObject, delta: JsonObject) -> None:
    """Add a delta to a message: texts are joined, tool calls merged by their index, other fields replaced."""
    for name, value in delta.items():
        if name == "tool_calls":
            for piece in dicts_in(value):
                _merge_call(message.setdefault("tool_calls", []), piece)
        elif name in ("content", "reasoning", "reasoning_content", "refusal") and isinstance(value, str):
            message[name] = (message.get(name) or "") + value
        elif value is not None:
            message[name] = value


def _merge_call(calls: list[JsonObject], piece: JsonObject) -> None:
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


def decode_json(data: str | bytes) -> object:
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


def _decode(data: str | bytes) -> JsonObject:
    """Decode a JSON object; anything else, such as an answer that was cut, becomes an empty one."""
    try:
        decoded = decode_json(data)
    except (ValueError, RecursionError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


def _index_of(choice: JsonObject) -> int:
    return index if isinstance(index := choice.get("index"), int) else 0


def _id_of(answer: JsonObject) -> str | None:
    return found if isinstance(found := answer.get("id"), str) else None


BlockKind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of a turn."""

    kind: BlockKind
    index: int
    """Position among the blocks of the turn."""
    text: str = ""
    """The text; of a call its arguments as JSON."""
    call_id: str = ""
    name: str = ""
    """Name of the called tool."""


@dataclass
class Turn:
    """An answer, as far as it has arrived."""

    id: str = ""
    """The engine's id without `chatcmpl-`."""
    model: str = ""
    created: int = 0
    """Time of the answer, in seconds since the epoch."""
    blocks: list[Block] = field(default_factory=list)
    finish_reason: str | None = None
    stop_word: str | None = None
    """The stop word that ended the turn, if the engine names it."""
    usage: JsonObject = field(default_factory=dict)

    def message(self) -> JsonObject:
        """Return the turn as a chat message that a later request can send back."""
        calls = [
            tool_call(block.call_id, block.name, block.text) for block in self.blocks if block.kind == "call"
        ]
        return normalize_message(
            {
                "role": "assistant",
                "content": self._joined("text"),
                "reasoning_content": self._joined("reasoning"),
                "tool_calls": calls,
            }
        )

    def incomplete_error(self) -> RequestError:
        """Return the error for a turn that has no usable finish reason."""
        message = (
            f"the engine's answer is incomplete (finish reason: {self.finish_reason}); send the request again"
        )
        return RequestError(message, 503, "server_error")

    @property
    def prompt_tokens(self) -> int:
        return self.usage.get("prompt_tokens") or 0

    @property
    def completion_tokens(self) -> int:
        return self.usage.get("completion_tokens") or 0

    @property
    def cached_tokens(self) -> int:
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0

    @property
    def reasoning_tokens(self) -> int:
        return (self.usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0

    def _joined(self, kind: BlockKind) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)


@dataclass(frozen=True)
class Step:
    """A change of a block. Each block starts, grows and stops before the next one starts."""

    kind: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""
    """The text that a delta adds."""


class BlockReader:
    """Reads the chunks of a streamed chat answer as steps of blocks.

    Attributes:
        turn: the answer, as far as it has arrived.
    """

    def __init__(self) -> None:
        self.turn = Turn()
        self._open: Block | None = None
        self._call_index: int | None = None
        self._held_back: list[tuple[BlockKind, str]] = []

    def feed(self, chunk: JsonObject) -> list[Step]:
        """Return the steps of a chunk.

        Raises:
            RequestError: 502, it is not a chunk of a chat answer, or it continues a call that has stopped.
        """
        try:
            _read_head(self.turn, chunk)
            return [step for choice in chunk["choices"] for step in self._read_choice(choice)]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise _unreadable(error) from error

    def finish(self) -> list[Step]:
        """Return the steps at the end of the answer."""
        return list(self._stop())

    def _read_choice(self, choice: JsonObject) -> Iterator[Step]:
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield from self._add_text("reasoning", reasoning)
        if content := delta.get("content") or delta.get("refusal"):
            yield from self._add_text("text", content)
        for piece in delta.get("tool_calls") or []:
            yield from self._add_call_piece(piece)
        _read_end(self.turn, choice)

    def _add_text(self, kind: BlockKind, text: str) -> Iterator[Step]:
        if self._open is not None and self._open.kind == "call":
            self._held_back.append((kind, text))
            return
        if self._open is None or self._open.kind != kind:
            yield from self._stop()
            yield self._start(kind)
        yield self._grow(text)

    def _add_call_piece(self, piece: JsonObject) -> Iterator[Step]:
        index, function = piece["index"], piece.get("function") or {}
        if self._call_index is None or index > self._call_index:
            yield from self._stop()
            self._call_index = index
            yield self._start("call", piece["id"], function["name"])
        elif index < self._call_index or self._open is None or self._open.kind != "call":
            raise ValueError(f"a piece of call {index} follows the end of this call")
        if arguments := function.get("arguments"):
            yield self._grow(arguments)

    def _start(self, kind: BlockKind, call_id: str = "", name: str = "") -> Step:
        self._open = Block(kind, len(self.turn.blocks), call_id=call_id, name=name)
        self.turn.blocks.append(self._open)
        return Step("start", self._open)

    def _grow(self, text: str) -> Step:
        assert self._open is not None
        self._open.text += text
        return Step("delta", self._open, text)

    def _stop(self) -> Iterator[Step]:
        """Stop the open block, then add the text that was held back meanwhile."""
        while self._open is not None:
            yield Step("stop", self._open)
            self._open = None
            held_back, self._held_back = self._held_back, []
            for kind, text in held_back:
                yield from self._add_text(kind, text)


def read_turn(answer: JsonObject) -> Turn:
    """Return the turn of a whole chat answer, which is read as a stream of one chunk.

    Raises:
        RequestError: 502, it is not a chat answer.
    """
    reader = BlockReader()
    try:
        choice = answer["choices"][0]
        message = normalize_message(choice["message"])
        calls = [{**call, "index": index} for index, call in enumerate(message.get("tool_calls", ()))]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _unreadable(error) from error
    reader.feed({**answer, "choices": [{**choice, "delta": {**message, "tool_calls": calls}}]})
    reader.finish()
    return reader.turn


def _read_head(turn: Turn, answer: JsonObject) -> None:
    turn.id = turn.id or str(answer["id"]).removeprefix("chatcmpl-")
    turn.model = turn.model or answer["model"]
    turn.created = turn.created or int(answer.get("created") or 0)
    turn.usage = answer.get("usage") or turn.usage


def _read_end(turn: Turn, choice: JsonObject) -> None:
    turn.finish_reason = choice.get("finish_reason") or turn.finish_reason
    if isinstance(word := choice.get("stop_reason"), str):
        turn.stop_word = word


def _unreadable(error: Exception) -> RequestError:
    problem = f"{type(error).__name__}: {error}"
    message = f"the engine's answer cannot be read as a chat completion: {problem}"
    return RequestError(message, 502)
