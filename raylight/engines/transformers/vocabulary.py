"""Between tokens and text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


class Vocabulary:
    """A tokenizer's way back to text. Special tokens have no text, except those that a parser looks for.

    Args:
        markers: words that stay in the text even where they are special tokens.
    """

    def __init__(self, tokenizer: Any, markers: Iterable[str] = ()) -> None:
        self._decode = getattr(tokenizer, "backend_tokenizer", tokenizer).decode
        kept = set(markers)
        special = zip(tokenizer.all_special_tokens, tokenizer.all_special_ids, strict=True)
        self._hidden = frozenset(i for token, i in special if token not in kept)

    def text(self, ids: list[int]) -> str:
        hidden = self._hidden
        return self._decode([i for i in ids if i not in hidden], skip_special_tokens=False)

    def word(self, token: int) -> str:
        """One token as it stands, special or not."""
        return self._decode([token], skip_special_tokens=False)
