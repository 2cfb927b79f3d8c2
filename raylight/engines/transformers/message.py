"""Incremental parsing of a model's text into an assistant message: reasoning, content and tool calls."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from raylight.engines import families
from raylight.engines.families import THINK, ReasoningNotation
from raylight.engines.transformers.text import overlap
from raylight.engines.transformers.tools import (
    FORMATS,
    Markers,
    MessagePiece,
    PieceKind,
    ToolCall,
    ToolFormat,
)
from raylight.errors import ConfigError
from raylight.types import JsonObject, Tokenizer
from raylight.types.json_object import parse_json

HARMONY_BODY = "<|message|>"
HARMONY_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
HARMONY_RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


@dataclass(frozen=True)
class Harmony(Markers):
    """`<|channel|>commentary to=functions.name<|message|>{...}<|call|>`; its parser is `HarmonyParser`."""

    def read(self, block: str, tools: Mapping[str, object]) -> list[ToolCall] | None:
        return None


HARMONY_FORMAT = Harmony("<|channel|>", "<|call|>", (HARMONY_BODY, *HARMONY_ENDS, "<|constrain|>"))
PARSERS: dict[str, ToolFormat] = {**FORMATS, "harmony": HARMONY_FORMAT}
"""Values of the engine's argument `tool_parser` -> the format of tool calls."""


@dataclass(frozen=True)
class MessageStyle:
    """A model's chat template, and the notation of its messages."""

    template: str
    tool_format: ToolFormat | None
    """None if the notation of its tool calls is not known."""
    reasoning: ReasoningNotation | None
    """None if the model writes none."""
    reason: str = ""
    """The findings that decided about the tool calls, for people."""

    @property
    def texts(self) -> tuple[str, ...]:
        """Texts with markers, which stay in the answer even if they are special tokens."""
        notations = (self.reasoning.open, self.reasoning.close) if self.reasoning else ()
        return (*(self.tool_format.texts if self.tool_format else ()), *notations)

    def parser(
        self, tools: Mapping[str, object] | None, prompt_end: str | None
    ) -> MessageParser | HarmonyParser:
        """Return a parser of one answer.

        Args:
            tools: tool name to the schema of its parameters; None leaves calls in the content.
            prompt_end: last text of the prompt, which may open the reasoning.
        """
        if isinstance(self.tool_format, Harmony):
            return HarmonyParser(calls=tools is not None)
        tool_format = None if tools is None else self.tool_format
        if self.reasoning is None:
            return MessageParser(tool_format, tools or {}, None)
        is_open = (prompt_end or "").rstrip().endswith(self.reasoning.open.rstrip())
        return MessageParser(tool_format, tools or {}, is_open, self.reasoning)


def find_style(
    tokenizer: Tokenizer,
    tool_parser: str | None,
    reasoning: bool | Literal["auto"],
    model_type: str = "",
) -> MessageStyle:
    """Detect a model's style, where an argument is "auto".

    Raises:
        ConfigError: `tool_parser` names an unknown parser.
    """
    if tool_parser not in (None, "auto", *PARSERS):
        raise ConfigError(f"engine.args.tool_parser is {tool_parser!r}; it is one of {', '.join(PARSERS)}")
    found = families.find_style(tokenizer, model_type)
    notation = found.notation if tool_parser == "auto" else tool_parser
    tool_format = PARSERS.get(notation) if notation else None
    reads = found.reasoning if reasoning == "auto" else (found.reasoning or THINK) if reasoning else None
    return MessageStyle(found.template, tool_format, reads, found.reason)


def think_first(
    structure: JsonObject, prompt_end: str, reasoning: ReasoningNotation = THINK
) -> tuple[JsonObject, str]:
    """Return the structural tag of an answer that may think before it has a structure, and an empty thought
    with all that may be between it and the structure.

    Args:
        structure: xgrammar's structural tag of the answer without its reasoning.
        prompt_end: last text of the prompt. A template opens the reasoning there, closes it, or leaves it to
            the model.
    """
    prompt_end = prompt_end.rstrip()
    if prompt_end.endswith(reasoning.close):
        return structure, ""
    is_open = prompt_end.endswith(reasoning.open.rstrip())
    thought = {
        "type": "tag",
        "begin": "" if is_open else reasoning.open,
        "content": {"type": "any_text"},
        "end": reasoning.close,
    }
    first: JsonObject = {
        "type": "sequence",
        "elements": [thought, {"type": "regex", "pattern": reasoning.gap}],
    }
    if not is_open:
        first = {"type": "optional", "content": first}
    elements = [first, structure]
    if reasoning.answer:
        elements.insert(1, {"type": "const_string", "value": reasoning.answer})
    empty = reasoning.answer or f"{thought['begin']}{reasoning.close}\n\n"
    return {"type": "sequence", "elements": elements}, empty


class MessageParser:
    """Splits an answer's text into pieces. White space around reasoning and calls is dropped.

    Args:
        tool_format: notation of tool calls; None leaves calls in the content.
        tools: tool name to the schema of its parameters.
        thinking: True if the prompt ends within reasoning, False if the answer may start with it, None if it
            has none.
        reasoning: notation of the reasoning.

    Attributes:
        reasoned: True once the answer has reasoning, finished or not.
    """

    def __init__(
        self,
        tool_format: ToolFormat | None,
        tools: Mapping[str, object],
        thinking: bool | None,
        reasoning: ReasoningNotation = THINK,
    ) -> None:
        self._format, self._tools, self._notation = tool_format, tools, reasoning
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
        text, opening = self._text.lstrip(), self._notation.open
        if text.startswith(opening):
            self._text, self._step, self._fresh = text[len(opening) :], self._reasoning, True
            self.reasoned = True
        elif self._last or not opening.startswith(text):
            self._step = self._content
        else:
            return None
        return []

    def _reasoning(self) -> list[MessagePiece] | None:
        return self._until("reasoning", self._notation.close, self._content)

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
        while marker and (end := self._text.find(marker, start)) >= 0:
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
        starts = ("{", *filter(None, self._format.texts))
        if text and not any(start.startswith(text[: len(start)]) for start in starts):
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


class HarmonyParser:
    """Splits an answer of gpt-oss, which consists of messages in channels, into pieces.

    The channel analysis is reasoning. A message to a function is a call, which becomes content if its
    arguments are not a JSON object, or if calls are not allowed. All other messages are content.

    Args:
        calls: True if the answer may call tools.

    Attributes:
        reasoned: True once the answer has reasoning, finished or not.
    """

    def __init__(self, calls: bool) -> None:
        self._calls = calls
        self._text = ""
        self._header: str | None = None
        """Header of the open message; None between messages."""
        self.reasoned = False

    @property
    def is_reasoning(self) -> bool:
        """True while the reasoning is not finished."""
        return self._header is not None and _harmony_kind(self._header) == "reasoning"

    def feed(self, text: str, last: bool = False) -> list[MessagePiece]:
        """Add text; returns the pieces that have become certain.

        Args:
            last: True if no more text follows.
        """
        self._text += text
        pieces: list[MessagePiece] = []
        while (more := self._step(last)) is not None:
            pieces += more
        return pieces

    def _step(self, last: bool) -> list[MessagePiece] | None:
        """Consume the front of the text; returns None when it needs more text."""
        if self._header is None:
            header, found, rest = self._text.partition(HARMONY_BODY)
            if found:
                self._header, self._text = header, rest
                self.reasoned = self.reasoned or self.is_reasoning
                return []
            if last and self._text:  # an answer without channels
                content, self._text = self._text, ""
                return [MessagePiece("content", content)]
            return None
        ends = [(index, end) for end in HARMONY_ENDS if (index := self._text.find(end)) >= 0]
        kind = _harmony_kind(self._header)
        if ends:
            index, end = min(ends)
            body, self._text = self._text[:index], self._text[index + len(end) :]
            header, self._header = self._header, None
            return self._emit(kind, header, body)
        if last:
            header, body = self._header, self._text
            self._header, self._text = None, ""
            return self._emit(kind, header, body)
        if kind == "call":
            return None
        keep = max(overlap(self._text, end) for end in HARMONY_ENDS)
        certain, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        return [MessagePiece(kind, certain)] if certain else None

    def _emit(self, kind: PieceKind, header: str, body: str) -> list[MessagePiece]:
        if kind == "call":
            recipient = HARMONY_RECIPIENT.search(header)
            values = parse_json(body) if body.strip() else {}
            if self._calls and recipient and isinstance(values, dict):
                return [MessagePiece("call", call=ToolCall(recipient[1], body.strip() or "{}"))]
            kind = "content"
        return [MessagePiece(kind, body)] if body else []


def _harmony_kind(header: str) -> PieceKind:
    if HARMONY_RECIPIENT.search(header):
        return "call"
    return "reasoning" if "analysis" in header else "content"
