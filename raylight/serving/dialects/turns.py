"""An engine's chat answer as a sequence of blocks (reasoning, text, calls of tools), which is how both other dialects tell it.

A turn has one choice. Blocks never overlap: what an engine says between the pieces of a call comes after the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from raylight.http.errors import RequestError
from raylight.serving.dialects.answers import tidy_message

Kind = Literal["reasoning", "text", "call"]


@dataclass
class Block:
    """A part of a turn."""

    kind: Kind
    index: int
    """Among the blocks of the turn."""
    text: str = ""
    """Of a call: its arguments."""
    call_id: str = ""
    name: str = ""
    """Of the tool."""


@dataclass
class Turn:
    """An answer, as far as it came."""

    id: str = ""
    """The engine's own, without what says that it is a chat completion."""
    model: str = ""
    created: int = 0
    """When, in seconds since 1970."""
    blocks: list[Block] = field(default_factory=list)
    finish_reason: str | None = None
    stop_word: str | None = None
    """The word that ended it, where the engine tells."""
    usage: dict[str, Any] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        """The turn as a message of chat, as it would be sent back."""
        texts = {
            kind: "".join(b.text for b in self.blocks if b.kind == kind) for kind in ("reasoning", "text")
        }
        calls = [
            {
                "id": block.call_id,
                "type": "function",
                "function": {"name": block.name, "arguments": block.text},
            }
            for block in self.blocks
            if block.kind == "call"
        ]
        return tidy_message(
            {
                "role": "assistant",
                "content": texts["text"],
                "reasoning_content": texts["reasoning"],
                "tool_calls": calls,
            }
        )

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


@dataclass(frozen=True)
class Step:
    """What happened to a block; blocks start and stop one after the other."""

    what: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""
    """The delta."""


class BlockReader:
    """Reads the chunks of a streamed chat answer.

    Attributes:
        turn: what came so far.
    """

    def __init__(self) -> None:
        self.turn = Turn()
        self._open: Block | None = None
        self._call: int | None = None
        self._held: list[tuple[Kind, str]] = []

    def feed(self, chunk: dict[str, Any]) -> list[Step]:
        """The steps of a chunk.

        Raises:
            RequestError: it is not a chunk of chat, or goes back to a call that is over.
        """
        try:
            _read_head(self.turn, chunk)
            return [step for choice in chunk["choices"] for step in self._choice(choice)]
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise _unreadable(error) from error

    def finish(self) -> list[Step]:
        """The steps at the end of the answer."""
        return list(self._stop())

    def _choice(self, choice: dict[str, Any]) -> Iterator[Step]:
        delta = choice.get("delta") or {}
        if reasoning := delta.get("reasoning_content") or delta.get("reasoning"):
            yield from self._say("reasoning", reasoning)
        if content := delta.get("content") or delta.get("refusal"):
            yield from self._say("text", content)
        for piece in delta.get("tool_calls") or []:
            yield from self._call_piece(piece)
        _read_end(self.turn, choice)

    def _say(self, kind: Kind, text: str) -> Iterator[Step]:
        if self._open is not None and self._open.kind == "call":
            self._held.append((kind, text))
            return
        if self._open is None or self._open.kind != kind:
            yield from self._stop()
            yield self._start(kind)
        yield self._add(text)

    def _call_piece(self, piece: dict[str, Any]) -> Iterator[Step]:
        index, function = piece["index"], piece.get("function") or {}
        if self._call is None or index > self._call:
            yield from self._stop()
            self._call = index
            yield self._start("call", piece["id"], function["name"])
        elif index < self._call or self._open is None or self._open.kind != "call":
            raise ValueError(f"a piece of call {index} came after the end of this call")
        if arguments := function.get("arguments"):
            yield self._add(arguments)

    def _start(self, kind: Kind, call_id: str = "", name: str = "") -> Step:
        self._open = Block(kind, len(self.turn.blocks), call_id=call_id, name=name)
        self.turn.blocks.append(self._open)
        return Step("start", self._open)

    def _add(self, text: str) -> Step:
        assert self._open is not None
        self._open.text += text
        return Step("delta", self._open, text)

    def _stop(self) -> Iterator[Step]:
        """End the open block, and say what was held back meanwhile."""
        while self._open is not None:
            yield Step("stop", self._open)
            self._open = None
            held, self._held = self._held, []
            for kind, text in held:
                yield from self._say(kind, text)


def read_turn(answer: dict[str, Any]) -> Turn:
    """The turn of a whole chat answer.

    Raises:
        RequestError: it is not an answer of chat.
    """
    turn = Turn()
    try:
        _read_head(turn, answer)
        choice = answer["choices"][0]
        message = tidy_message(choice["message"])
        _read_end(turn, choice)
        said: list[tuple[Kind, Any]] = [("reasoning", message.get("reasoning_content"))]
        said.append(("text", message["content"] or message.get("refusal")))
        for kind, text in said:
            if text:
                if not isinstance(text, str):
                    raise TypeError(f"its {kind} is not a string")
                turn.blocks.append(Block(kind, len(turn.blocks), text))
        for call in message.get("tool_calls", []):
            function = call["function"]
            turn.blocks.append(
                Block("call", len(turn.blocks), function["arguments"], call["id"], function["name"])
            )
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
    return RequestError(
        f"the engine's answer cannot be read as one of chat completions: {problem}", 502, "server_error"
    )
