"""Stored conversations of an attempt: a tree of turns, in which every sampled answer has its tokens.

A turn stores the canonical form of one message, so that memory grows with the messages that are new, and so
that a message that differs can be compared with what was stored.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from sys import getsizeof

import numpy as np

from raylight.serving.conversations.message_forms import MessageForm
from raylight.types import HistoryNote, IntArray, Message

OVERHEAD = 1_000
"""Memory of a turn without its text, its calls and its tokens, in bytes."""
MAX_COMPARED = 64
"""Number of sampled answers, the latest ones, that a message is compared with."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenPrefix:
    """The tokens of a conversation up to an answer, stored as the difference to an earlier prefix."""

    base: TokenPrefix | None
    suffix: IntArray
    length: int
    """Number of tokens, including `base`."""
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
        parts: list[IntArray] = []
        prefix: TokenPrefix | None = self
        missing = self.output_length
        while prefix is not None and missing > 0:
            parts.append(prefix.suffix[max(len(prefix.suffix) - missing, 0) :])
            missing -= len(parts[-1])
            prefix = prefix.base
        return [token for part in parts[::-1] for token in part.tolist()]

    def is_prefix_of(self, tokens: IntArray) -> bool:
        """True if `tokens`, shape (tokens,), begins with this prefix."""
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

    def keep_used(self, first: int) -> None:
        """Drop the turns whose last use is before a number."""
        self._turns = {key: turn for key, turn in self._turns.items() if turn.used >= first}
        self._loose = None

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
    used: int = 0
    """Number of the last request that had this message. No turn is used later than the one above it."""

    @property
    def size(self) -> int:
        """Memory of the turn in bytes. Prefixes share tokens, so that each adds its own."""
        size = (
            OVERHEAD + getsizeof(self.form.text) + (0 if self.prefix is None else self.prefix.suffix.nbytes)
        )
        if self.form.calls or self.form.others:
            size += getsizeof(str(self.form.calls)) + getsizeof(str(self.form.others))
        return size


def prune(roots: Iterable[Branches], most: float) -> int:
    """Drop the turns that were not used for longest, with those after them; returns the bytes left.

    Args:
        most: bytes to keep at most.
    """
    by_use: Counter[int] = Counter()
    every = list(roots)
    for turn in _unique_turns(every):
        by_use[turn.used] += turn.size
    kept, first = 0, max(by_use, default=0) + 1
    for used in sorted(by_use, reverse=True):
        if kept + by_use[used] > most:
            break
        kept, first = kept + by_use[used], used
    for branches in [*every, *(turn.next for turn in _unique_turns(every))]:
        branches.keep_used(first)
    return kept


def _unique_turns(roots: Iterable[Branches]) -> list[StoredTurn]:
    """Return all turns once. A rewritten turn has the same turns after it as the stored one."""
    found: dict[int, StoredTurn] = {}
    left = list(roots)
    while left:
        for turn in left.pop():
            if id(turn) not in found:
                found[id(turn)] = turn
                left.append(turn.next)
    return list(found.values())
