"""Batches of tasks: full, shuffled in each pass, and repeatable by seed and position."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raylight.experience.task_sampler import TaskSampler


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_batches_are_full_and_every_pass_has_every_task_once(count: int, size: int, seed: int) -> None:
    tasks = list(range(count))
    batches = list(itertools.islice(TaskSampler(tasks, size, seed), 6))
    assert {len(batch) for batch in batches} == {size}
    stream = [task for batch in batches for task in batch]
    for start in range(0, len(stream) - count + 1, count):
        assert sorted(stream[start : start + count]) == tasks
    assert batches == list(itertools.islice(TaskSampler(tasks, size, seed), 6))
    assert tasks == list(range(count))


def test_each_pass_has_another_order() -> None:
    passes = list(itertools.islice(TaskSampler(list(range(20)), 20, 0), 3))
    assert passes[0] != passes[1] != passes[2]


@pytest.mark.parametrize("consumed", [0, 3, 6, 7, 14, 21, 40])
def test_seek_continues_the_same_order(consumed: int) -> None:
    sampler, resumed = TaskSampler(list(range(7)), 3, seed=5), TaskSampler(list(range(7)), 3, seed=5)
    drawn = [task for _ in range(20) for task in next(sampler)]
    next(resumed)
    resumed.seek(consumed)
    assert [task for _ in range(6) for task in next(resumed)] == drawn[consumed : consumed + 18]
    assert resumed.consumed == consumed + 18
    assert sorted(drawn[:7]) == list(range(7))
    assert drawn[:7] != drawn[7:14]
