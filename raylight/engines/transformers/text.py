"""Tokens to text as they come: no half characters, and nothing of a stop word."""

from __future__ import annotations

from collections.abc import Callable

Decode = Callable[[list[int]], str]

BROKEN = "\N{REPLACEMENT CHARACTER}"
HALF = 3
"""Replacement characters at the end of a text that may yet become one whole character: a character has at most four bytes."""


class TextStream:
    """The text of a growing list of tokens, up to the first stop word.

    Args:
        decode: text of token ids.
        stop: words at which the text ends; they are not part of it.
        min_tokens: stop words that these first tokens complete do not count.
    """

    def __init__(self, decode: Decode, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._decode, self._stop, self._min_tokens = decode, stop, min_tokens
        self._context: list[int] = []
        """The last settled tokens, without which a decoder may not tell whether a space comes first."""
        self._open: list[int] = []
        """Tokens since then."""
        self._given = 0
        """Characters of the open tokens' text that are in `_held` already."""
        self._tokens = 0
        self._held = ""
        """Text that may still turn out to be part of a stop word."""
        self.stop_word: str | None = None
        """What ended the text."""

    @property
    def stopped(self) -> bool:
        return self.stop_word is not None

    def feed(self, ids: list[int]) -> str:
        """Take more tokens; returns what text they add for certain."""
        if self.stopped or not ids:
            return ""
        if self._tokens < self._min_tokens:
            free = ids[: self._min_tokens - self._tokens]
            self._tokens += len(free)
            text, self._held = self._held + self._settled(free), ""
            return text + self.feed(ids[len(free) :])
        self._tokens += len(ids)
        self._held += self._settled(ids)
        return self._take()

    def finish(self) -> str:
        """The rest of the text, at the end of the tokens."""
        if self.stopped:
            return ""
        text, self._held = self._held + self._text()[self._given :], ""
        return text

    def _settled(self, ids: list[int]) -> str:
        """Text of the open tokens and these that more tokens will not change."""
        self._open += ids
        text = self._text()
        broken = len(text) - len(text.rstrip(BROKEN))
        end = max(len(text) - min(broken, HALF), self._given)
        new, self._given = text[self._given : end], end
        if not broken and text:
            self._context, self._open, self._given = self._open, [], 0
        return new

    def _text(self) -> str:
        """Text of the open tokens."""
        if not self._open or not self._context:
            return self._decode(self._open)
        return self._decode(self._context + self._open)[len(self._decode(self._context)) :]

    def _take(self) -> str:
        """Cut the held text at the first stop word, or give all of it that cannot be part of one."""
        found = [(place, word) for word in self._stop if (place := self._held.find(word)) >= 0]
        if found:
            place, self.stop_word = min(found)
            return self._held[:place]
        keep = max((overlap(self._held, word) for word in self._stop), default=0)
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(text) :]
        return text


def overlap(text: str, word: str) -> int:
    """Length of the longest end of `text` with which `word` begins, shorter than the word itself."""
    for size in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:size]):
            return size
    return 0
