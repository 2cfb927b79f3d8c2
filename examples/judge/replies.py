"""Answers to customers, courteous or not: to imitate, and in pairs with the preference of people."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

from agent import INSTRUCTIONS, merit

ITEMS = ("lamp", "chair", "table", "clock", "phone", "book")
PROBLEMS = ("late", "lost", "broken", "wrong")
ANSWERS = [
    f"{opening} We look at it. {closing}"
    for opening, closing in itertools.product(
        ("Thanks for writing.", "So it goes."), ("We are sorry.", "That is all.", "It is your fault.")
    )
]
FLIPPED = 0.1
"""Part of the pairs in which people prefer the worse answer."""
RAMBLING = 0.5
"""Part of the answers in pairs that repeat their sentences: what a reward model has not seen, it may score
highly, and the policy finds it."""


def make_tasks(count: int) -> list[dict[str, str]]:
    """Return messages of customers."""
    messages = [f"The {item} is {problem}." for item in ITEMS for problem in PROBLEMS]
    return [{"message": messages[i % len(messages)]} for i in range(count)]


def demonstrate(seed: int) -> Iterator[list[dict[str, str]]]:
    """Yield all answers equally often: one in six is courteous."""
    chance = random.Random(seed)
    for task in make_tasks(3000):
        yield [*_asked(task), {"role": "assistant", "content": chance.choice(ANSWERS)}]


def make_pairs(count: int, seed: int) -> list[dict[str, Any]]:
    """Return pairs of answers; half of them ramble. A stand-in for people prefers the better one, with some
    mistakes."""
    chance, pairs = random.Random(seed), []
    for task in make_tasks(count):
        first = second = ""
        while merit(first) == merit(second):
            first, second = _write(chance), _write(chance)
        better, worse = sorted((first, second), key=merit, reverse=chance.random() >= FLIPPED)
        pairs.append(
            {
                "prompt": _asked(task),
                "chosen": [{"role": "assistant", "content": better}],
                "rejected": [{"role": "assistant", "content": worse}],
            }
        )
    return pairs


def _write(chance: random.Random) -> str:
    answer = chance.choice(ANSWERS)
    if chance.random() < RAMBLING:
        more = [f"{sentence}." for sentence in answer.rstrip(".").split(". ")]
        answer = " ".join([answer, *chance.choices(more, k=chance.randint(1, 12))])
    return answer


def _asked(task: dict[str, str]) -> list[dict[str, str]]:
    return [{"role": "system", "content": INSTRUCTIONS}, {"role": "user", "content": task["message"]}]
