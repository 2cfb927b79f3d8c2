"""Incremental parsing of a model's text into an assistant message: reasoning, content and tool calls."""

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

THINK, END_THINK = "<think>", "</think>"
MARKERS = (THINK, END_THINK, OPEN, CLOSE, PYTHON_TAG)
"""Words that the parsers look for. They must stay in the text even if they are special tokens."""


@dataclass(frozen=True)
class MessageStyle:
    """A model's chat template, and the notation of its messages."""

    template: str
    tool_format: ToolFormat | None
    """None if the model is not known to call tools."""
    thinks: bool
    """True if the model writes reasoning between `<think>` and `</think>`."""


def find_style(
    tokenizer: Any, tool_parser: ToolParserName | Literal["auto"] | None, reasoning: bool | Literal["auto"]
) -> MessageStyle:
    """Detect a model's style from its chat template, where an argument is "auto"."""
    templates = getattr(tokenizer, "chat_template", None)
    template = "\n".join(templates.values()) if isinstance(templates, dict) else templates or ""
    thinks = THINK in template if reasoning == "auto" else reasoning
    if tool_parser == "auto":
        return MessageStyle(template, find_format(template), thinks)
    return MessageStyle(template, FORMATS[tool_parser] if tool_parser else None, thinks)


def think_first(structure: dict[str, Any], prompt_end: str) -> tuple[dict[str, Any], str]:
    """Return the structural tag of an answer that may think before it has a structure, and an empty thought
    with all that may be between it and the structure.

    Args:
        structure: xgrammar's structural tag of the answer without its reasoning.
        prompt_end: last text of the prompt. A template opens the reasoning there, closes it, or leaves it to
            the model.
    """
    prompt_end = prompt_end.rstrip()
    if prompt_end.endswith(END_THINK):
        return structure, ""
    is_open = prompt_end.endswith(THINK)
    thought = {
        "type": "tag",
        "begin": "" if is_open else THINK,
        "content": {"type": "any_text"},
        "end": END_THINK,
    }
    first: dict[str, Any] = {
        "type": "sequence",
        "elements": [thought, {"type": "regex", "pattern": r"\n{0,2}"}],
    }
    if not is_open:
        first = {"type": "optional", "content": first}
    empty = f"{thought['begin']}{END_THINK}\n\n"
    return {"type": "sequence", "elements": [first, structure]}, empty


@dataclass(frozen=True)
class MessagePiece:
    """A part of a message."""

    kind: Literal["reasoning", "content", "call"]
    text: str = ""
    call: ToolCall | None = None


class MessageParser:
    """Splits an answer's text into pieces. White space around reasoning and calls is dropped.

    Args:
        tool_format: notation of tool calls; None leaves calls in the content.
        tools: tool name to the schema of its parameters.
        thinking: True if the prompt ends within reasoning, False if the answer may start with it, None if it
            has none.

    Attributes:
        reasoned: True once the answer has reasoning, finished or not.
    """

    def __init__(
        self, tool_format: ToolFormat | None, tools: Mapping[str, Any], thinking: bool | None
    ) -> None:
        self._format, self._tools = tool_format, tools
        self._step = {None: self._content, False: self._start, True: self._reasoning}[thinking]
        self.reasoned = bool(thinking)
        self._text = ""
        self._last = False
        self._space = ""
        """Trailing white space, emitted only if more of the same kind follows."""
        self._fresh = bool(thinking)
        """True right after a marker, where white space is dropped."""

    @property
    def is_reasoning(self) -> bool:
        """True while the reasoning is not finished."""
        return self._step == self._reasoning

    def feed(self, text: str, last: bool = False) -> list[MessagePiece]:
        """Add text; returns the pieces that have become certain.

        Args:
            last: True if no more text follows.
        """
        self._text += text
        self._last = last
        pieces: list[MessagePiece] = []
        while (more := self._step()) is not None:
            pieces += more
        if last and self._space and not self._fresh and self._step != self._reasoning:
            pieces.append(MessagePiece("content", self._space))
        return pieces

    # steps: each consumes the front of the text, and returns None when it needs more text

    def _start(self) -> list[MessagePiece] | None:
        text = self._text.lstrip()
        if text.startswith(THINK):
            self._text, self._step, self._fresh = text[len(THINK) :], self._reasoning, True
            self.reasoned = True
        elif self._last or not THINK.startswith(text):
            self._step = self._content
        else:
            return None
        return []

    def _reasoning(self) -> list[MessagePiece] | None:
        return self._until("reasoning", END_THINK, self._content)

    def _content(self) -> list[MessagePiece] | None:
        if self._format is None:
            return self._until("content", "", self._content)
        if not self._format.open:
            return self._calls_only()
        return self._until("content", self._format.open, self._call)

    def _until(
        self, kind: Literal["reasoning", "content"], marker: str, then: Any
    ) -> list[MessagePiece] | None:
        """Emit the text up to a marker, and continue with the step `then` after it."""
        before, matched, after = self._text.partition(marker) if marker else (self._text, "", "")
        if matched:
            pieces = self._emit(kind, before)
            self._text, self._step = after, then
            if kind == "reasoning":
                self._space, self._fresh = "", True
            return pieces
        keep = 0 if self._last or not marker else overlap(self._text, marker)
        certain, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        return self._emit(kind, certain) if certain else None

    def _call(self) -> list[MessagePiece] | None:
        """Parse one call, up to the end marker that completes it; an unreadable call becomes content."""
        assert self._format is not None
        marker, start = self._format.close, 0
        while (end := self._text.find(marker, start)) >= 0:
            block, start = self._text[:end], end + len(marker)
            if calls := self._format.read(block, self._tools):
                return self._emit_calls(calls, self._text[start:])
            if not _within_string(block):
                return self._emit_as_content(block + marker, self._text[start:])
        if not self._last:
            return None
        if calls := self._format.read(self._text, self._tools):  # complete except for the end marker
            return self._emit_calls(calls, "")
        return self._emit_as_content(self._text, "")

    def _calls_only(self) -> list[MessagePiece] | None:
        """Parse an answer that is either calls only or no call."""
        assert self._format is not None
        text = self._text.lstrip()
        if text and text[0] != "{" and not PYTHON_TAG.startswith(text[: len(PYTHON_TAG)]):
            self._format = None
            return []
        if not self._last or not text:
            return self._until("content", "", self._content) if self._last else None
        if calls := self._format.read(text, self._tools):
            return self._emit_calls(calls, "")
        self._format = None
        return []

    def _emit_calls(self, calls: list[ToolCall], rest: str) -> list[MessagePiece]:
        self._text, self._step, self._space, self._fresh = rest, self._content, "", True
        return [MessagePiece("call", call=call) for call in calls]

    def _emit_as_content(self, text: str, rest: str) -> list[MessagePiece]:
        assert self._format is not None
        self._text, self._step = rest, self._content
        return self._emit("content", self._format.open + text)

    def _emit(self, kind: Literal["reasoning", "content"], text: str) -> list[MessagePiece]:
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if self._fresh:
            kept = kept.lstrip()
        if not kept:
            return []
        self._fresh = False
        return [MessagePiece(kind, kept)]


def _within_string(text: str) -> bool:
    """True if JSON text ends within a string."""
    return re.sub(r"\\.", "", text, flags=re.DOTALL).count('"') % 2 == 1
