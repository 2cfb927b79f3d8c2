"""Tasks of numbered groups: shuffled in each pass, and repeatable by seed and number."""

from hypothesis import given
from hypothesis import strategies as st

from raylight.tasks.task_set import TaskSampler


@given(st.integers(1, 9), st.integers(0, 3))
def test_every_pass_has_every_task_once(count: int, seed: int) -> None:
    tasks = list(range(count))
    sampler = TaskSampler(tasks, seed)
    stream = [sampler.draw(group).task for group in range(6 * count)]
    for start in range(0, len(stream), count):
        assert sorted(stream[start : start + count]) == tasks
    assert tasks == list(range(count))


def test_each_pass_and_each_seed_has_another_order() -> None:
    samplers = [TaskSampler(list(range(20)), seed) for seed in (0, 1)]
    orders = {
        tuple(sampler.draw(start + i).task for i in range(20)) for sampler in samplers for start in (0, 20)
    }
    assert len(orders) == 4


@given(st.lists(st.integers(0, 200), max_size=30))
def test_the_task_of_a_group_does_not_depend_on_what_was_asked_before(groups: list[int]) -> None:
    sampler = TaskSampler(list(range(3)), seed=5)
    assert [sampler.draw(group).task for group in groups] == [
        TaskSampler(list(range(3)), seed=5).draw(group).task for group in groups
    ]
