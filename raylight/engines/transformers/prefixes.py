"""Keys and values of recent prompts and responses, so that a common prefix is computed once.

The rollouts of a group begin with the same prompt, and each call of a conversation continues the one before.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from raylight.engines.transformers.adapters import LoadedAdapter
from raylight.types import IntArray, RouteArray

SLOTS_PER_PREFIX = 4
"""Slots for each longest sequence for whose tokens there is room: groups of rollouts are rarely smaller."""
BLOCK = 16
"""Tokens by which prefixes are looked up. A shorter prompt is found as a whole."""
LayerStates = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer, shape (heads, tokens, head size)."""


def count_kept_sequences(slots: int) -> int:
    """Return the number of longest sequences for whose tokens there is room besides the slots."""
    return max(slots // SLOTS_PER_PREFIX, 1)


@dataclass(frozen=True, eq=False)
class Prefix:
    """Computed tokens.

    Attributes:
        keys: hashes of its first blocks, the last one of all tokens.
        routes: routes of its tokens, if they are recorded.
    """

    ids: IntArray
    states: LayerStates
    keys: list[int]
    routes: RouteArray | None = None


class PrefixCache:
    """Prefixes of up to `capacity` tokens in all. The least recently used ones make room for new ones."""

    def __init__(self, capacity: int) -> None:
        self._capacity, self._tokens = capacity, 0
        self._used: dict[Prefix, None] = {}
        """All prefixes, the least recently used first."""
        self._index: dict[int, Prefix] = {}
        """Prefix that was used last of those that begin with some blocks, by the hash of these."""

    def find(self, adapter: LoadedAdapter | None, ids: IntArray) -> tuple[Prefix | None, int]:
        """Return the prefix that has the most tokens in common with `ids`, shape (tokens,), and their number.

        At least one token of the sequence is left to compute.
        """
        found = None
        for key in _keys(adapter, ids):
            if (longer := self._index.get(key)) is None:
                break
            found = longer
        if found is None:
            return None, 0
        self._use(found)
        return found, min(_count_common(found.ids, ids), len(ids) - 1)

    def keep(
        self,
        adapter: LoadedAdapter | None,
        ids: IntArray,
        states: LayerStates,
        routes: RouteArray | None = None,
    ) -> None:
        """Add the prefix `ids`, shape (tokens,). It replaces the prefixes that it continues."""
        prefix = Prefix(ids, states, list(_keys(adapter, ids)), routes)
        for shorter in {self._index[key] for key in prefix.keys if key in self._index}:
            if _count_common(shorter.ids, ids) == len(shorter.ids):
                self._remove(shorter)
        self._tokens += len(ids)
        self._use(prefix)
        while self._tokens > self._capacity:
            self._remove(next(iter(self._used)))

    def clear(self) -> None:
        """Forget all prefixes, because weights have changed."""
        self._tokens = 0
        self._used.clear()
        self._index.clear()

    def _use(self, prefix: Prefix) -> None:
        self._used.pop(prefix, None)
        self._used[prefix] = None
        self._index.update(dict.fromkeys(prefix.keys, prefix))

    def _remove(self, prefix: Prefix) -> None:
        del self._used[prefix]
        self._tokens -= len(prefix.ids)
        for key in prefix.keys:
            if self._index.get(key) is prefix:
                del self._index[key]


def _keys(adapter: LoadedAdapter | None, ids: IntArray) -> Iterator[int]:
    """Yield a hash of each number of first blocks. Equal hashes do not imply equal tokens."""
    key = hash(adapter)
    for start in range(0, len(ids), BLOCK):
        key = hash((key, ids[start : start + BLOCK].tobytes()))
        yield key


def _count_common(one: IntArray, other: IntArray) -> int:
    """Return the number of first tokens that two sequences, shapes (tokens,), have in common."""
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if len(differs) else size
