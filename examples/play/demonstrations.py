"""Moves of a teacher, from which the tiny model learns the form of a move and a little of the game."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from agent import MOST, question

MOST_STONES = 11
POSITIONS = 256


def demonstrate(seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield positions with the move that wins, or with one stone where none does."""
    chance = random.Random(seed)
    for _ in range(POSITIONS):
        stones = chance.randint(1, MOST_STONES)
        move = stones % (MOST + 1) or 1
        yield [{"role": "user", "content": question(stones)}, {"role": "assistant", "content": str(move)}]
