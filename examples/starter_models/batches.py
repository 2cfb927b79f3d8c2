"""Batches of demonstration rows, and the careless teacher that makes a model right only some of the time."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from raylight.experience.batches.demonstrations import DemonstrationRow

MAX_ROWS, MAX_TOKENS = 128, 6144
"""Largest number of rows and of tokens, with padding, in a batch; a batch has at least one row."""
COARSE = 32
"""Lengths that differ by fewer tokens count as equal, so that similar rows are not together in a batch."""
WINDOW = 16
"""Batches whose rows are sorted by length together, so that little is padding."""


def batches(
    rows: Sequence[DemonstrationRow], generator: random.Random, max_tokens: int = MAX_TOKENS
) -> Iterator[list[DemonstrationRow]]:
    """Yield batches without end: each row once in random order, and again.

    Args:
        rows: at least one row.
        max_tokens: tokens of a batch, with padding, at most.
    """
    drawn: list[DemonstrationRow] = []
    while True:
        while len(drawn) < MAX_ROWS * WINDOW:
            drawn += generator.sample(rows, len(rows))
        window = sorted(drawn[: MAX_ROWS * WINDOW], key=lambda row: len(row.tokens) // COARSE)
        drawn = drawn[MAX_ROWS * WINDOW :]
        groups = list(split_by_size(window, max_tokens))
        generator.shuffle(groups)
        yield from groups


def split_by_size(
    rows: Sequence[DemonstrationRow], max_tokens: int = MAX_TOKENS
) -> Iterator[list[DemonstrationRow]]:
    """Yield consecutive rows that together, padded to the longest of them, are within the limits."""
    group: list[DemonstrationRow] = []
    width = 0
    for row in rows:
        wider = max(width, len(row.tokens))
        if group and (len(group) == MAX_ROWS or wider * (len(group) + 1) > max_tokens):
            yield group
            group, wider = [], len(row.tokens)
        group.append(row)
        width = wider
    if group:
        yield group


class CarelessTeacher:
    """A teacher that gives some answers with one wrong token.

    The wrong token is one that another demonstration has at the same place of an answer. So mistakes look
    like answers: another digit or another action, and no broken syntax where all answers have the same.

    Args:
        rows: rows whose answers provide the wrong tokens.
        rate: probability that an answer gets a wrong token.
    """

    def __init__(self, rows: Sequence[DemonstrationRow], rate: float, generator: random.Random) -> None:
        self._rate = rate
        self._random = generator
        found: dict[tuple[int, int], set[int]] = {}
        for row in rows:
            for number, (start, end) in enumerate(row.answers):
                for position in range(start, end - 1):  # the last token ends the turn
                    place = number, position - start
                    found.setdefault(place, set()).add(row.tokens[position])
        self._by_place = {place: sorted(tokens) for place, tokens in found.items()}

    def answer(self, row: DemonstrationRow) -> DemonstrationRow:
        """Return the row, or a copy with wrong tokens."""
        tokens = list(row.tokens)
        for number, (start, end) in enumerate(row.answers):
            if self._random.random() < self._rate:
                self._spoil(tokens, number, start, end - 1)
        return replace(row, tokens=tokens) if tokens != row.tokens else row

    def _spoil(self, tokens: list[int], number: int, start: int, end: int) -> None:
        """Replace one token of an answer, at a place where other answers have others."""
        for position in self._random.sample(range(start, end), end - start):
            known = self._by_place.get((number, position - start), [])
            if others := [token for token in known if token != tokens[position]]:
                tokens[position] = self._random.choice(others)
                return


def careless_rate(rows: Sequence[DemonstrationRow], accuracy: float) -> float:
    """Return the rate of wrong answers with which a part `accuracy` of the rows has right answers only."""
    answers = sum(len(row.answers) for row in rows) / len(rows)
    return 1 - accuracy ** (1 / answers)
