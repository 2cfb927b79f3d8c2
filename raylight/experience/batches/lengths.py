"""Sampled tokens by the length of their rollout: a run may train fewer tokens of long rollouts than of short
ones, because they are too old when they end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

SHORTEST, FACTOR = 16, 4
"""Bound of the class of the shortest rollouts, and ratio of one class's bound to the next shorter one's."""


def length_class(tokens: int) -> int:
    """Return the bound of a rollout's class: the smallest of 16, 64, 256, ... that is not below its number of
    sampled tokens."""
    bound = SHORTEST
    while bound < tokens:
        bound *= FACTOR
    return bound


def count_by_length(rollouts: Iterable[tuple[int, int]]) -> Counter[int]:
    """Return numbers of tokens by the class of their rollout.

    Args:
        rollouts: sampled tokens of each rollout, and how many of them count.
    """
    counts: Counter[int] = Counter()
    for sampled, counted in rollouts:
        if counted:
            counts[length_class(sampled)] += counted
    return counts
