"""Micro-batch plans: every row once, no micro-batch over the budget."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from raylight.experience.batches.token_budgets import plan_micro_batches


def cost(lengths, packed):
    return sum(lengths) if packed else len(lengths) * max(lengths)


@given(st.lists(st.integers(2, 50), min_size=1, max_size=30), st.integers(50, 200), st.booleans())
def test_every_row_is_in_one_part_and_no_part_is_over_the_budget(lengths, budget, packed):
    parts = plan_micro_batches(lengths, budget, packed)
    assert sorted(place for part in parts for place in part) == list(range(len(lengths)))
    assert all(cost([lengths[place] for place in part], packed) <= budget for part in parts)


@pytest.mark.parametrize(("packed", "parts"), [(True, [[0, 1], [2]]), (False, [[1], [0, 2]])])
def test_padding_counts(packed, parts):
    assert plan_micro_batches([4, 6, 4], 10, packed) == parts


def test_a_row_over_the_budget_is_alone():
    assert plan_micro_batches([3, 30, 3], 10, packed=True) == [[1], [0, 2]]
