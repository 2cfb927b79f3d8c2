"""Stored conversations of an attempt: a tree of turns, in which every sampled answer has its tokens.

A turn stores the canonical form of one message, so that memory grows with the messages that are new, and so
that a message that differs can be compared with what was stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from raylight.serving.conversations.message_forms import MessageForm
from raylight.types import HistoryNote

Message: TypeAlias = dict[str, Any]

OVERHEAD = 64
"""Memory of a turn beside its text and its tokens, in tokens."""
CHARS_PER_TOKEN = 4
"""Characters of a turn's text that take as much memory as a token."""
MAX_COMPARED = 64
"""Number of sampled answers, the latest ones, that a message is compared with."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenPrefix:
    """The tokens of a conversation up to an answer, stored as the difference to an earlier prefix."""

    base: TokenPrefix | None
    suffix: NDArray[np.uint32]
    length: int
    """Number of tokens, including those of `base`."""
    output_length: int
    """Number of sampled tokens at the end."""

    def tokens(self) -> list[int]:
        parts, prefix = [], self
        while True:
            parts.append(prefix.suffix)
            if prefix.base is None:
                return np.concatenate(parts[::-1]).tolist()
            prefix = prefix.base

    def output(self) -> list[int]:
        """Return the sampled tokens at the end."""
        parts: list[NDArray[np.uint32]] = []
        prefix: TokenPrefix | None = self
        missing = self.output_length
        while prefix is not None and missing > 0:
            parts.append(prefix.suffix[max(len(prefix.suffix) - missing, 0) :])
            missing -= len(parts[-1])
            prefix = prefix.base
        return [token for part in parts[::-1] for token in part.tolist()]

    def is_prefix_of(self, tokens: NDArray[np.uint32]) -> bool:
        """True if `tokens` begins with this prefix."""
        prefix: TokenPrefix | None = self
        while prefix is not None:
            start = prefix.length - len(prefix.suffix)
            if not np.array_equal(prefix.suffix, tokens[start : prefix.length]):
                return False
            prefix = prefix.base
        return True


class Branches:
    """The turns that follow a turn, by the digests of their forms."""

    __slots__ = ("_loose", "_turns")

    def __init__(self) -> None:
        self._turns: dict[bytes, StoredTurn] = {}
        self._loose: dict[bytes, StoredTurn] | None = None
        """The same turns by digests without white space; built when first needed."""

    def __bool__(self) -> bool:
        return bool(self._turns)

    def __iter__(self) -> Iterator[StoredTurn]:
        """Iterate from the latest turn to the first one."""
        return iter(reversed(self._turns.values()))

    def add(self, turn: StoredTurn) -> None:
        self._turns[turn.form.digest] = turn
        if self._loose is not None:
            self._loose[turn.form.loose_digest()] = turn

    def find(self, form: MessageForm) -> StoredTurn | None:
        return self._turns.get(form.digest)

    def find_loose(self, form: MessageForm) -> StoredTurn | None:
        """Return the latest turn that differs from a form by white space at most."""
        if self._loose is None:
            self._loose = {turn.form.loose_digest(): turn for turn in self._turns.values()}
        return self._loose.get(form.loose_digest())

    def sampled(self) -> list[StoredTurn]:
        """Return the latest sampled answers, the last one first."""
        found: list[StoredTurn] = []
        for turn in self:
            if turn.prefix is not None and turn.note is None:
                found.append(turn)
                if len(found) == MAX_COMPARED:
                    break
        return found


@dataclass(slots=True, eq=False)
class StoredTurn:
    """One message of stored conversations, after the messages above it in the tree."""

    form: MessageForm
    prefix: TokenPrefix | None = None
    """Tokens up to and including this message; None if it is not an answer, or was not sampled."""
    next: Branches = field(default_factory=Branches)
    note: HistoryNote | None = None
    """Difference between this message, as sent, and the stored one that it stands for; None if it is the
    stored one."""
    shown: list[Message] | None = None
    """Messages that the prompt has in place of this one; None for the message itself."""

    @property
    def size(self) -> int:
        """Memory of the turn without its sampled tokens, in tokens."""
        appended = 0 if self.prefix is None or self.prefix.output_length else len(self.prefix.suffix)
        return OVERHEAD + len(self.form.text) // CHARS_PER_TOKEN + appended
