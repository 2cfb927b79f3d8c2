"""An assistant's message out of the text of a model: its reasoning, its content and its tool calls, as they come."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raylight.engines.transformers.text import overlap
from raylight.engines.transformers.tools import (
    CLOSE,
    FORMATS,
    OPEN,
    PYTHON_TAG,
    ToolCall,
    ToolFormat,
    ToolParserName,
    find_format,
)

THINK, THOUGHT = "<think>", "</think>"
MARKERS = (THINK, THOUGHT, OPEN, CLOSE, PYTHON_TAG)
"""Words that the parsers look for, and so must see even where they are special tokens."""


@dataclass(frozen=True)
class Style:
    """How a model writes its messages, and its chat template."""

    template: str
    format: ToolFormat | None
    """Of tool calls."""
    thinks: bool


def find_style(
    tokenizer: Any, tool_parser: ToolParserName | Literal["auto"] | None, reasoning: bool | Literal["auto"]
) -> Style:
    """What a tokenizer's chat template tells of it, where the arguments do not."""
    given = getattr(tokenizer, "chat_template", None)
    template = "\n".join(given.values()) if isinstance(given, dict) else given or ""
    thinks = THINK in template if reasoning == "auto" else reasoning
    if tool_parser == "auto":
        return Style(template, find_format(template), thinks)
    return Style(template, FORMATS[tool_parser] if tool_parser else None, thinks)


@dataclass(frozen=True)
class Piece:
    """Some more of a message."""

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: ToolCall | None = None


class MessageParser:
    """Splits an answer's text. White space around thoughts and calls belongs to neither.

    Args:
        format: how tool calls are written; None leaves them in the content.
        tools: the parameters' schema of each tool by name.
        thinking: whether the prompt ends within a thought; None if the answer has no thoughts.
    """

    def __init__(self, format: ToolFormat | None, tools: Mapping[str, Any], thinking: bool | None) -> None:
        self._format, self._tools = format, tools
        self._step = {None: self._content, False: self._beginning, True: self._thought}[thinking]
        self._text = ""
        self._last = False
        self._space = ""
        """White space that is given only if more of the same kind follows."""
        self._fresh = bool(thinking)
        """Right after a mark, where white space is dropped."""

    def feed(self, text: str, last: bool = False) -> list[Piece]:
        """Take more text; returns what is certain.

        Args:
            last: no more will come.
        """
        self._text += text
        self._last = last
        pieces: list[Piece] = []
        while (more := self._step()) is not None:
            pieces += more
        if last and self._space and not self._fresh and self._step != self._thought:
            pieces.append(Piece("content", self._space))
        return pieces

    # steps: each takes from the front of the text; None when there is nothing more to take

    def _beginning(self) -> list[Piece] | None:
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._text, self._step, self._fresh = text[len(THINK) :], self._thought, True
        elif self._last or not THINK.startswith(text):
            self._step = self._content
        else:
            return None
        return []

    def _thought(self) -> list[Piece] | None:
        return self._until("reasoning", THOUGHT, self._content)

    def _content(self) -> list[Piece] | None:
        if self._format is None:
            return self._until("content", "", self._content)
        if not self._format.open:
            return self._whole()
        return self._until("content", self._format.open, self._call)

    def _until(self, kind: Literal["reasoning", "content"], mark: str, then: Any) -> list[Piece] | None:
        """Give the text up to a mark, and take the step `then` after it."""
        before, found, after = self._text.partition(mark) if mark else (self._text, "", "")
        if found:
            pieces = self._give(kind, before)
            self._text, self._step = after, then
            if kind == "reasoning":
                self._space, self._fresh = "", True
            return pieces
        keep = 0 if self._last or not mark else overlap(self._text, mark)
        given, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        return self._give(kind, given) if given else None

    def _call(self) -> list[Piece] | None:
        """One call, up to the end mark with which it can be read; or else its text."""
        assert self._format is not None
        mark, start = self._format.close, 0
        while (end := self._text.find(mark, start)) >= 0:
            block, start = self._text[:end], end + len(mark)
            if calls := self._format.read(block, self._tools):
                return self._called(calls, self._text[start:])
            if not _within_string(block):
                return self._uncalled(block + mark, self._text[start:])
        if not self._last:
            return None
        if calls := self._format.read(self._text, self._tools):  # complete, but for the end mark
            return self._called(calls, "")
        return self._uncalled(self._text, "")

    def _whole(self) -> list[Piece] | None:
        """The whole answer is calls, or none is."""
        assert self._format is not None
        text = self._text.lstrip()
        if text and text[0] != "{" and not PYTHON_TAG.startswith(text[: len(PYTHON_TAG)]):
            self._format = None
            return []
        if not self._last or not text:
            return self._until("content", "", self._content) if self._last else None
        if calls := self._format.read(text, self._tools):
            return self._called(calls, "")
        self._format = None
        return []

    def _called(self, calls: list[ToolCall], rest: str) -> list[Piece]:
        self._text, self._step, self._space, self._fresh = rest, self._content, "", True
        return [Piece("call", call=call) for call in calls]

    def _uncalled(self, text: str, rest: str) -> list[Piece]:
        assert self._format is not None
        self._text, self._step = rest, self._content
        return self._give("content", self._format.open + text)

    def _give(self, kind: Literal["reasoning", "content"], text: str) -> list[Piece]:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if self._fresh:
            kept = kept.lstrip()
        if not kept:
            return []
        self._fresh = False
        return [Piece(kind, kept)]


def _within_string(text: str) -> bool:
    """Whether JSON text ends within a string."""
    return re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1
