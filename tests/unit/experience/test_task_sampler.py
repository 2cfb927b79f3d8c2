"""Order of the tasks: shuffled passes, repeatable by seed and position."""

import pytest

from raylight.experience.task_sampler import TaskSampler


@pytest.mark.parametrize("consumed", [0, 3, 6, 7, 14, 21, 40])
def test_seek_continues_the_same_order(consumed: int):
    sampler, resumed = TaskSampler(list(range(7)), 3, seed=5), TaskSampler(list(range(7)), 3, seed=5)
    drawn = [task for _ in range(20) for task in next(sampler)]
    next(resumed)
    resumed.seek(consumed)
    assert [task for _ in range(6) for task in next(resumed)] == drawn[consumed : consumed + 18]
    assert resumed.consumed == consumed + 18
    assert sorted(drawn[:7]) == list(range(7))
    assert drawn[:7] != drawn[7:14]
