"""Numbers of the groups that training steps took."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from raylight.trainer.loops.training_groups import TakenGroups
from raylight.types import StepGroups


@given(st.lists(st.sets(st.integers(0, 30)), max_size=8), st.integers(0, 40))
def test_the_rest_is_all_that_no_step_took(steps: list[set[int]], start: int) -> None:
    taken, known = TakenGroups(), set[int]()
    for step in steps:
        if not (new := sorted(step - known)):
            continue
        taken.add(StepGroups(tuple(new[1:]), tuple(new[:1])))
        known |= step
    taken = TakenGroups(**taken.to_json())
    expected = [group for group in range(start, start + 80) if group not in known][:40]
    assert list(itertools.islice(taken.rest(start), 40)) == expected
    assert len(taken) == len(known)
    assert len(taken.open) <= taken.next - len(known)
