"""Batches of rows and the careless teacher."""

import itertools
import random

from examples.starter_models.batches import (
    MAX_ROWS,
    MAX_TOKENS,
    CarelessTeacher,
    batches,
    careless_rate,
    split_by_size,
)
from raylight.experience.batches.demonstrations import DemonstrationRow


def row(*answer: int, prompt: int = 3) -> DemonstrationRow:
    """Return a row with one answer, whose last token ends the turn."""
    return DemonstrationRow([0] * prompt + [*answer, 99], [(prompt, prompt + len(answer) + 1)])


def test_a_group_is_within_the_limits() -> None:
    rows = [row(1, prompt=length) for length in (10, 9000, 1000, 1000, *[1000] * 9)]
    groups = list(split_by_size(rows))
    assert [r for group in groups for r in group] == rows
    assert all(len(g) == 1 or max(len(r.tokens) for r in g) * len(g) <= MAX_TOKENS for g in groups)
    assert [len(group) for group in split_by_size([row(1)] * 300)] == [MAX_ROWS, MAX_ROWS, 300 - 2 * MAX_ROWS]
    assert len(next(split_by_size([row(1)] * 300, 50))) == 50 // len(row(1).tokens)


def test_batches_show_every_row_equally_often() -> None:
    rows = [row(number) for number in range(100)]
    shown = itertools.chain.from_iterable(itertools.islice(batches(rows, random.Random(0)), 32))
    counts = [0] * 100
    for one in shown:
        counts[one.tokens[3]] += 1
    assert min(counts) >= 40
    assert max(counts) <= 42


def test_a_careless_answer_has_one_token_of_another_answer() -> None:
    rows = [row(7, number) for number in range(10)]
    teacher = CarelessTeacher(rows, 1.0, random.Random(0))
    for one in rows:
        careless = teacher.answer(one)
        changed = [i for i, (a, b) in enumerate(zip(one.tokens, careless.tokens, strict=True)) if a != b]
        assert changed == [4]  # never the 7 that all answers have, the prompt, or the end
        assert careless.answers == one.answers


def test_the_rate_of_careless_answers() -> None:
    rows = [DemonstrationRow([0, a, 99, 1, b, 99], [(1, 3), (4, 6)]) for a in range(50) for b in range(50)]
    teacher = CarelessTeacher(rows, careless_rate(rows, 0.4), random.Random(0))
    right = sum(teacher.answer(one) == one for one in rows) / len(rows)
    assert abs(right - 0.4) < 0.04
