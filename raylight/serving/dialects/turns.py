"""An engine's chat answer as a turn of blocks: reasoning, text and tool calls, in their order.

Translated dialects answer in blocks. A turn is one choice. Blocks never overlap: text between the pieces of a
call follows the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from raylight.http.errors import RequestError
from raylight.serving.dialects.chat_messages import normalize_message, tool_call

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
    usage: dict[str, Any] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
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

    def feed(self, chunk: dict[str, Any]) -> list[Step]:
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

    def _read_choice(self, choice: dict[str, Any]) -> Iterator[Step]:
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

    def _add_call_piece(self, piece: dict[str, Any]) -> Iterator[Step]:
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


def read_turn(answer: dict[str, Any]) -> Turn:
    """Return the turn of a whole chat answer.

    Raises:
        RequestError: 502, it is not a chat answer.
    """
    turn = Turn()
    try:
        _read_head(turn, answer)
        choice = answer["choices"][0]
        message = normalize_message(choice["message"])
        _read_end(turn, choice)
        texts: list[tuple[BlockKind, Any]] = [
            ("reasoning", message.get("reasoning_content")),
            ("text", message["content"] or message.get("refusal")),
        ]
        for kind, text in texts:
            if text:
                if not isinstance(text, str):
                    raise TypeError(f"its {kind} is not a string")
                turn.blocks.append(Block(kind, len(turn.blocks), text))
        for call in message.get("tool_calls", []):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            turn.blocks.append(Block("call", len(turn.blocks), arguments, call["id"], name))
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise _unreadable(error) from error
    return turn


def _read_head(turn: Turn, answer: dict[str, Any]) -> None:
    turn.id = turn.id or str(answer["id"]).removeprefix("chatcmpl-")
    turn.model = turn.model or answer["model"]
    turn.created = turn.created or int(answer.get("created") or 0)
    turn.usage = answer.get("usage") or turn.usage


def _read_end(turn: Turn, choice: dict[str, Any]) -> None:
    turn.finish_reason = choice.get("finish_reason") or turn.finish_reason
    if isinstance(word := choice.get("stop_reason"), str):
        turn.stop_word = word


def _unreadable(error: Exception) -> RequestError:
    problem = f"{type(error).__name__}: {error}"
    message = f"the engine's answer cannot be read as a chat completion: {problem}"
    return RequestError(message, 502, "server_error")
