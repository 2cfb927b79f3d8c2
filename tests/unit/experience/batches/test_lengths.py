"""Classes of lengths."""

from hypothesis import given
from hypothesis import strategies as st

from raylight.experience.batches.lengths import FACTOR, SHORTEST, count_by_length, length_class


def test_a_bound_belongs_to_its_class() -> None:
    assert [length_class(n) for n in (0, 1, 16, 17, 64, 65, 100_000)] == [16, 16, 16, 64, 64, 256, 262_144]


@given(st.integers(0, 10**12))
def test_each_length_is_in_one_class(tokens: int) -> None:
    bound = length_class(tokens)
    assert tokens <= bound
    assert bound == SHORTEST or tokens > bound // FACTOR


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 50))))
def test_every_token_is_counted_once(rollouts: list[tuple[int, int]]) -> None:
    counts = count_by_length(rollouts)
    assert counts.total() == sum(counted for _, counted in rollouts)
    assert 0 not in counts.values()
