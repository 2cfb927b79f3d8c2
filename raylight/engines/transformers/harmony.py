"""Parsing of gpt-oss's answers, which consist of messages in channels: reasoning, calls and text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from raylight.engines.transformers.schema_values import parse_json
from raylight.engines.transformers.text import overlap
from raylight.engines.transformers.tools import Markers, MessagePiece, PieceKind, ToolCall

BODY = "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|start|>")
RECIPIENT = re.compile(r"to=functions\.([^\s<]+)")


@dataclass(frozen=True)
class Harmony(Markers):
    """`<|channel|>commentary to=functions.name<|message|>{...}<|call|>`; its parser is `HarmonyParser`."""

    def read(self, block: str, tools: Mapping[str, object]) -> list[ToolCall] | None:
        return None


HARMONY_FORMAT = Harmony("<|channel|>", "<|call|>", (BODY, *ENDS, "<|constrain|>"))


class HarmonyParser:
    """Splits an answer in channels into pieces.

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
        return self._header is not None and _kind(self._header) == "reasoning"

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
            header, found, rest = self._text.partition(BODY)
            if found:
                self._header, self._text = header, rest
                self.reasoned = self.reasoned or self.is_reasoning
                return []
            if last and self._text:  # an answer without channels
                content, self._text = self._text, ""
                return [MessagePiece("content", content)]
            return None
        ends = [(index, end) for end in ENDS if (index := self._text.find(end)) >= 0]
        kind = _kind(self._header)
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
        keep = max(overlap(self._text, end) for end in ENDS)
        certain, self._text = self._text[: len(self._text) - keep], self._text[len(self._text) - keep :]
        return [MessagePiece(kind, certain)] if certain else None

    def _emit(self, kind: PieceKind, header: str, body: str) -> list[MessagePiece]:
        if kind == "call":
            recipient = RECIPIENT.search(header)
            values = parse_json(body) if body.strip() else {}
            if self._calls and recipient and isinstance(values, dict):
                return [MessagePiece("call", call=ToolCall(recipient[1], body.strip() or "{}"))]
            kind = "content"
        return [MessagePiece(kind, body)] if body else []


def _kind(header: str) -> PieceKind:
    if RECIPIENT.search(header):
        return "call"
    return "reasoning" if "analysis" in header else "content"
