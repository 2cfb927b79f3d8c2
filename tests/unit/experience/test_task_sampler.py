"""Batches of tasks: full, shuffled in each pass, and the same for the same seed."""

from __future__ import annotations

import itertools

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


def test_each_pass_is_shuffled_anew() -> None:
    passes = list(itertools.islice(TaskSampler(list(range(20)), 20, 0), 3))
    assert passes[0] != passes[1] != passes[2]
