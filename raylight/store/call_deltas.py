"""Encoding of captured calls as what they add to earlier calls of their attempt.

It remembers the calls that it has encoded: the latest one of each branch of an attempt's conversations, since
that has the tokens and texts of those before. Nothing depends on it: a call of which it knows no beginning is
stored completely.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from cachetools import LRUCache

from raylight.semconv import INPUT_MESSAGES, REQUEST_PARAMETERS, TOOL_DEFINITIONS
from raylight.store.call_rows import generation_bytes
from raylight.store.records import ClosedCall
from raylight.store.rows import Row, call_span_row
from raylight.types import CallKey, Generation, IntArray, Span

CAPACITY = 2**26
"""Bytes that a client remembers. The attempts that were used last are kept."""
OVERHEAD = 1_400
"""Memory of a branch beside its tokens and texts, in bytes."""
MAX_BRANCHES = 64
"""Branches of an attempt that are remembered."""
MIN_TOKENS = 16
"""Fewest tokens that are worth sharing."""
MIN_TEXT = 64
"""Fewest characters that are worth sharing."""
TEXTS = (INPUT_MESSAGES, TOOL_DEFINITIONS, REQUEST_PARAMETERS)
"""Attributes of a call's span that repeat those of earlier calls."""


@dataclass(frozen=True, slots=True, eq=False)
class _Branch:
    """The latest call of a branch, with the tokens and texts of its record."""

    call_id: str
    tokens: tuple[IntArray, ...]
    """Tokens of the prompt and of the output; empty for a call without tokens."""
    span_id: str
    """Id of its span; "" if it has none."""
    texts: dict[str, str]
    size: int
    """Memory in bytes."""

    @property
    def messages(self) -> str:
        return self.texts.get(INPUT_MESSAGES, "")

    def token(self, index: int) -> int | None:
        """Token at a position; None behind the end."""
        for part in self.tokens:
            if index < len(part):
                return part[index]
            index -= len(part)
        return None

    def count_shared(self, prompt: IntArray) -> int:
        """Number of this call's tokens with which a prompt begins."""
        count = 0
        for part in self.tokens:
            shared = _count_equal(prompt[count:], part)
            count += shared
            if shared < len(part):
                break
        return count

    def is_within(self, other: _Branch, shared: int) -> bool:
        """True if another call, which begins with `shared` tokens of this one, has all its tokens and
        messages, apart from the last bracket."""
        return shared == sum(map(len, self.tokens)) and other.messages.startswith(self.messages[:-1])


class _Branches(list[_Branch]):
    """Branches of an attempt, and their memory in bytes."""

    __slots__ = ("size",)

    def __init__(self) -> None:
        super().__init__()
        self.size = 0


class CallDeltas:
    """Encoder of the calls that one client records.

    Args:
        capacity: bytes that are remembered.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._attempts: LRUCache[str, _Branches] = LRUCache(capacity, getsizeof=lambda known: known.size)

    def encode(self, key: CallKey, generation: Generation | None, span: Span | None) -> ClosedCall:
        """Encode a call, and remember it.

        If the store does not receive it, `forget` its attempt.

        Raises:
            SpanError: the span cannot be stored.
            TypeError: the sampling parameters cannot be stored.
        """
        branches: list[_Branch] = self._attempts.get(key.attempt_id, [])
        base, shared, data, tokens = None, 0, None, 0
        if generation is not None:
            base, shared = _find_base(branches, generation.prompt_ids)
            data, tokens = generation_bytes(generation, shared), len(generation.output_ids)
        texts = {} if span is None else _texts_of(span)
        row, continued = (None, None) if span is None else _span_delta(branches, span, texts)
        if generation is not None or span is not None:
            branch = _branch(key.call_id, generation, span, texts)
            before = base if generation is not None else continued
            if before is not None and not before.is_within(branch, shared):
                before = None
            self._remember(key.attempt_id, branch, before)
        base_id = base.call_id if base is not None else None
        return key.rollout_id, key.attempt_id, key.call_id, base_id, shared, data, tokens, row

    def encode_completely(self, key: CallKey, generation: Generation | None, span: Span | None) -> ClosedCall:
        """Encode a call without a base, because the store does not have one that it had."""
        self.forget([key.attempt_id])
        return self.encode(key, generation, span)

    def forget(self, attempt_ids: Iterable[str]) -> None:
        """Forget attempts: the store may not have their latest calls."""
        for attempt_id in attempt_ids:
            self._attempts.pop(attempt_id, None)

    def _remember(self, attempt_id: str, branch: _Branch, before: _Branch | None) -> None:
        """Add a branch in place of the one that it continues."""
        known = self._attempts.get(attempt_id) or _Branches()
        if before is not None:
            known.remove(before)
        known.append(branch)
        known.size += branch.size - (before.size if before is not None else 0)
        while len(known) > MAX_BRANCHES or known.size > self._attempts.maxsize:
            known.size -= known.pop(0).size
        self._attempts[attempt_id] = known


def _branch(call_id: str, generation: Generation | None, span: Span | None, texts: dict[str, str]) -> _Branch:
    size = OVERHEAD + sum(map(sys.getsizeof, texts.values()))
    tokens = () if generation is None else (generation.prompt_ids, generation.output_ids)
    size += sum(part.nbytes for part in tokens)
    return _Branch(call_id, tokens, span.span_id if span else "", texts, size)


def _find_base(branches: list[_Branch], prompt: IntArray) -> tuple[_Branch | None, int]:
    """Return the call that shares the longest beginning, and its length; None and 0 if it is too short."""
    best, length = None, MIN_TOKENS - 1
    for branch in reversed(branches):
        if length >= len(prompt):
            break
        if branch.token(length) == prompt[length] and (shared := branch.count_shared(prompt)) > length:
            best, length = branch, shared
    return (best, length) if best else (None, 0)


def _span_delta(branches: list[_Branch], span: Span, texts: dict[str, str]) -> tuple[Row, _Branch | None]:
    """Row of a call's span, and the branch whose texts it continues."""
    messages = texts.get(INPUT_MESSAGES, "")
    base, longest = None, MIN_TEXT - 1
    for branch in reversed(branches):
        if longest >= len(messages) - 1:  # all but the last bracket
            break
        if branch.span_id and branch.messages.startswith(messages[: longest + 1]):
            base, longest = branch, _count_shared(messages, branch.messages)
    if base is None:
        return call_span_row(span, span.attributes), None
    lengths = {name: _count_shared(text, base.texts.get(name, "")) for name, text in texts.items()}
    shared = {name: length for name, length in lengths.items() if length >= MIN_TEXT}
    attributes = {name: span.attributes[name][length:] for name, length in shared.items()}
    return call_span_row(span, span.attributes | attributes, base.span_id, shared), base


def _texts_of(span: Span) -> dict[str, str]:
    """Texts that later spans may continue."""
    texts = ((name, span.attributes.get(name)) for name in TEXTS)
    return {name: text for name, text in texts if isinstance(text, str)}


def _count_equal(one: IntArray, other: IntArray) -> int:
    """Number of equal tokens at the beginning of both."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _count_shared(text: str, earlier: str) -> int:
    """Number of equal characters at the beginning of both, without the last bracket of the earlier one."""
    low, high = 0, min(len(text), len(earlier) - 1)
    middle = high  # mostly all of them are equal
    while low < high:
        if text.startswith(earlier[low:middle], low):
            low = middle
        else:
            high = middle - 1
        middle = (low + high + 1) // 2
    return low
