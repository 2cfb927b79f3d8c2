"""Relation of a call's messages to the conversations that its attempt has already sampled."""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

ContinuedKind: TypeAlias = Literal["continued", "white_space", "suffix", "calls_as_text", "merged"]
DriftKind: TypeAlias = Literal[
    "answer_edited",
    "call_edited",
    "history_edited",
    "history_truncated",
    "system_edited",
    "tools_changed",
    "variables_changed",
    "template",
    "unsupported",
    "token_in_off",
]
HistoryKind: TypeAlias = ContinuedKind | DriftKind | Literal["new"]

CONTINUED: dict[ContinuedKind, str] = {
    "continued": "the messages are as sampled",
    "white_space": "a message has other white space than before",
    "suffix": "text was appended to an answer, such as a stop word",
    "calls_as_text": "tool calls were sent back as text",
    "merged": "an answer was merged with the assistant message after it",
}
"""Kinds of histories that continue a conversation in tokens, with their meanings."""
DRIFTS: dict[DriftKind, str] = {
    "answer_edited": "the text of an earlier answer was edited",
    "call_edited": "a tool call of an earlier answer was edited, removed or added",
    "history_edited": "an earlier message that is not an answer was edited, inserted or removed",
    "history_truncated": "earlier messages were removed or summarized",
    "system_edited": "the system message was edited",
    "tools_changed": "the tools of the request changed",
    "variables_changed": "the variables of the chat template changed",
    "template": "the chat template does not allow its turns to be rendered separately",
    "unsupported": "a message has content other than text and tool calls",
    "token_in_off": "the request switched token-in off",
}
"""Kinds of histories that break a conversation, with their meanings."""


class HistoryNote(NamedTuple):
    """Relation of a request's messages to the stored conversations, and the first place where they differ."""

    kind: HistoryKind
    """"new": no stored conversation was changed; the request begins one, or branches off."""
    reason: str = ""
    message: int | None = None
    """Index of the first message that differs, in the request as translated to chat."""
    offset: int | None = None
    """First character that differs in the text of that message."""
    sampled: str = ""
    """Excerpt of the stored conversation from there."""
    sent: str = ""
    """Excerpt of the request from there."""

    @property
    def place(self) -> str:
        """The first difference as text; empty if there is none."""
        if self.message is None:
            return ""
        where = f"message {self.message}" + ("" if self.offset is None else f", character {self.offset}")
        return f"{where}: was {self.sampled!r}, sent {self.sent!r}" if self.sampled or self.sent else where
