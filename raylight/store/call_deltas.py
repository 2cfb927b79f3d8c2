"""Encoding of captured calls as what they add to earlier calls of their attempt.

It remembers the calls that it has encoded: the latest one of each branch of an attempt's conversations, since
that has the tokens and texts of those before. Nothing depends on it: a call of which it knows no beginning is
stored completely.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from raylight.semconv import INPUT_MESSAGES, REQUEST_PARAMETERS, TOOL_DEFINITIONS
from raylight.store.call_rows import generation_bytes
from raylight.store.records import ClosedCall
from raylight.store.rows import Row, span_row
from raylight.types import CallKey, Generation, Span

CAPACITY = 2**28
"""Bytes of tokens and texts that are remembered. The attempts that were used last are kept."""
MAX_BRANCHES = 64
"""Branches of an attempt that are remembered."""
MIN_TOKENS = 16
"""Fewest tokens that are worth sharing."""
MIN_TEXT = 64
"""Fewest characters that are worth sharing."""
TEXTS = (INPUT_MESSAGES, TOOL_DEFINITIONS, REQUEST_PARAMETERS)
"""Attributes of a call's span that repeat those of earlier calls."""
Symbols = NDArray[Any]
"""Token ids (int32), or the characters of an ASCII text (uint8)."""


@dataclass(frozen=True, slots=True, eq=False)
class _Branch:
    """The latest call of a branch."""

    call_id: str
    tokens: Symbols
    """Tokens of the prompt and the output; empty for a call without tokens."""
    span_id: str
    """Id of its span; "" if it has none."""
    texts: dict[str, Symbols]

    @property
    def size(self) -> int:
        return self.tokens.nbytes + sum(text.nbytes for text in self.texts.values())

    def messages(self) -> Symbols:
        return self.texts.get(INPUT_MESSAGES, _NOTHING)


_NOTHING: Symbols = np.empty(0, np.int32)


class CallDeltas:
    """Encoder of the calls that one client records.

    Args:
        capacity: bytes of tokens and texts that are remembered.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._attempts: LRUCache[str, list[_Branch]] = LRUCache(
            capacity, getsizeof=lambda branches: sum(branch.size for branch in branches)
        )

    def encode(self, key: CallKey, generation: Generation | None, span: Span | None) -> ClosedCall:
        """Encode a call, and remember it.

        If the store does not receive it, `forget` its attempt.

        Raises:
            SpanError: the span cannot be stored.
            TypeError: the sampling parameters cannot be stored.
        """
        branches = self._attempts.get(key.attempt_id, [])
        tokens, base, shared, data = _NOTHING, None, 0, None
        if generation is not None:
            prompt = generation.prompt_ids
            base, shared = _find_base(branches, prompt, lambda branch: branch.tokens, MIN_TOKENS)
            data, tokens = generation_bytes(generation, shared), generation.token_ids
        texts = {} if span is None else _texts_of(span)
        row, continued = (None, None) if span is None else _span_delta(branches, span, texts)
        if generation is not None or span is not None:
            branch = _Branch(key.call_id, tokens, span.span_id if span else "", texts)
            self._remember(key.attempt_id, branches, branch, base if generation is not None else continued)
        base_id = base.call_id if base is not None else None
        return key.rollout_id, key.attempt_id, key.call_id, base_id, shared, data, row

    def encode_completely(self, key: CallKey, generation: Generation | None, span: Span | None) -> ClosedCall:
        """Encode a call without a base, because the store does not have one that it had."""
        self.forget([key.attempt_id])
        return self.encode(key, generation, span)

    def forget(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts: the store may not have their latest calls."""
        for attempt_id in attempt_ids:
            self._attempts.pop(attempt_id, None)

    def _remember(
        self, attempt_id: str, branches: list[_Branch], branch: _Branch, base: _Branch | None
    ) -> None:
        kept = [other for other in branches if other is not base or not _contains(branch, other)]
        kept = [*kept[-MAX_BRANCHES + 1 :], branch]
        while kept and sum(other.size for other in kept) > self._attempts.maxsize:
            del kept[0]
        self._attempts.pop(attempt_id, None)
        if kept:
            self._attempts[attempt_id] = kept


def _contains(branch: _Branch, other: _Branch) -> bool:
    """True if a call has all tokens and messages of another one, apart from the last bracket."""
    messages = other.messages()[:-1]
    return (
        len(other.tokens) <= len(branch.tokens)
        and np.array_equal(other.tokens, branch.tokens[: len(other.tokens)])
        and np.array_equal(messages, branch.messages()[: len(messages)])
    )


def _span_delta(branches: list[_Branch], span: Span, texts: dict[str, Symbols]) -> tuple[Row, _Branch | None]:
    """Row of a call's span, and the branch whose texts it continues."""
    with_span = [branch for branch in branches if branch.span_id]
    messages = texts.get(INPUT_MESSAGES, _NOTHING)
    base, _ = _find_base(with_span, messages, _Branch.messages, MIN_TEXT)
    if base is None:
        return span_row(span, base=""), None
    lengths = {
        name: _common_length(text, base.texts[name]) for name, text in texts.items() if name in base.texts
    }
    shared = {name: length for name, length in lengths.items() if length >= MIN_TEXT}
    attributes = {name: span.attributes[name][length:] for name, length in shared.items()}
    rest = span.model_copy(update={"attributes": span.attributes | attributes})
    return span_row(rest, base.span_id, shared), base


def _texts_of(span: Span) -> dict[str, Symbols]:
    """Texts that later spans may continue."""
    texts = {name: span.attributes.get(name) for name in TEXTS}
    return {
        name: np.frombuffer(text.encode(), np.uint8)
        for name, text in texts.items()
        if isinstance(text, str) and text.isascii()
    }


def _find_base(
    branches: list[_Branch], wanted: Symbols, symbols_of: Callable[[_Branch], Symbols], least: int
) -> tuple[_Branch | None, int]:
    """Return the branch that shares the longest beginning, and its length; None and 0 if it is too short."""
    best, length = None, 0
    for branch in reversed(branches):
        if length == len(wanted):
            break
        symbols = symbols_of(branch)
        if len(symbols) <= length or symbols[length] != wanted[length]:
            continue  # it cannot share more
        if (common := _common_length(wanted, symbols)) > length:
            best, length = branch, common
    return (best, length) if length >= least else (None, 0)


def _common_length(one: Symbols, other: Symbols) -> int:
    """Number of equal symbols at the beginning of both."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length
