"""Incremental conversion of tokens to text: no incomplete characters, and no part of a stop word."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from raylight.types import Tokenizer

Decode = Callable[[list[int]], str]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
MAX_INCOMPLETE = 3
"""Most replacement characters at the end of a text that may still become one character, which has at most
four bytes."""


class Vocabulary:
    """Token ids to text. Special tokens have no text, except the markers.

    Args:
        markers: texts whose special tokens stay in the text.
    """

    def __init__(self, tokenizer: Tokenizer, markers: Iterable[str] = ()) -> None:
        backend: Any = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._decode: Callable[..., str] = backend.decode
        kept = tuple(markers)
        special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        self._hidden = frozenset(i for token, i in special if not any(token in text for text in kept))

    def text(self, ids: list[int]) -> str:
        """Decode ids without the hidden special tokens."""
        hidden = self._hidden
        return self._decode([i for i in ids if i not in hidden], skip_special_tokens=False)

    def word(self, token: int) -> str:
        """Decode one token, special or not."""
        return self._decode([token], skip_special_tokens=False)


class TextStream:
    """The text of a growing list of tokens, up to the first stop word.

    Args:
        decode: converts token ids to text.
        stop: words that end the text; they are not part of it.
        min_tokens: stop words completed by these first tokens are ignored.
    """

    def __init__(self, decode: Decode, stop: tuple[str, ...] = (), min_tokens: int = 0) -> None:
        self._decode, self._stop, self._min_tokens = decode, stop, min_tokens
        self._context: list[int] = []
        """The last tokens whose text is final; a decoder may need them to place a leading space."""
        self._recent: list[int] = []
        """Tokens after `_context`."""
        self._emitted = 0
        """Number of characters of the recent tokens' text that have been moved to `_held`."""
        self._tokens = 0
        self._held = ""
        """Final text that may still turn out to be part of a stop word."""
        self.stop_word: str | None = None
        """The stop word that ended the text."""

    @property
    def stopped(self) -> bool:
        """True after a stop word."""
        return self.stop_word is not None

    def feed(self, ids: list[int]) -> str:
        """Add tokens; returns the text that has become certain."""
        if self.stopped or not ids:
            return ""
        if self._tokens < self._min_tokens:
            exempt = ids[: self._min_tokens - self._tokens]
            self._tokens += len(exempt)
            text, self._held = self._held + self._final_text(exempt), ""
            return text + self.feed(ids[len(exempt) :])
        self._tokens += len(ids)
        self._held += self._final_text(ids)
        return self._release()

    def finish(self) -> str:
        """Return the rest of the text, after the last token."""
        if self.stopped:
            return ""
        text, self._held = self._held + self._recent_text()[self._emitted :], ""
        return text

    def _final_text(self, ids: list[int]) -> str:
        """Add tokens; returns the new text that later tokens cannot change."""
        self._recent += ids
        text = self._recent_text()
        incomplete = len(text) - len(text.rstrip(REPLACEMENT))
        end = max(len(text) - min(incomplete, MAX_INCOMPLETE), self._emitted)
        new, self._emitted = text[self._emitted : end], end
        if not incomplete and text:
            self._context, self._recent, self._emitted = self._recent, [], 0
        return new

    def _recent_text(self) -> str:
        if not self._recent or not self._context:
            return self._decode(self._recent)
        return self._decode(self._context + self._recent)[len(self._decode(self._context)) :]

    def _release(self) -> str:
        """Cut the held text at the first stop word, or return the part of it that cannot belong to one."""
        matches = [(index, word) for word in self._stop if (index := self._held.find(word)) >= 0]
        if matches:
            index, self.stop_word = min(matches)
            return self._held[:index]
        keep = max((overlap(self._held, word) for word in self._stop), default=0)
        text = self._held[: len(self._held) - keep]
        self._held = self._held[len(text) :]
        return text


def overlap(text: str, word: str) -> int:
    """Length of the longest proper prefix of `word` with which `text` ends."""
    for size in range(min(len(word) - 1, len(text)), 0, -1):
        if text.endswith(word[:size]):
            return size
    return 0
