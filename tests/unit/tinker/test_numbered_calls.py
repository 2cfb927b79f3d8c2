"""A numbered call is executed once, and its answer is kept until the next one."""

import pytest

from raylight.errors import NonFiniteGradientError
from raylight.tinker.trainer_actor import NumberedCalls


class Counter:
    def __init__(self) -> None:
        self.steps = 0

    def step(self, size: int) -> int:
        self.steps += size
        return self.steps

    def fail(self) -> None:
        self.steps += 1
        raise NonFiniteGradientError("infinite")


def test_a_repeated_call_has_its_first_answer() -> None:
    counter = Counter()
    calls = NumberedCalls(counter)
    assert [calls.call(number, "step", 2) for number in (1, 1, 4, 4)] == [2, 2, 4, 4]
    for _ in range(2):
        with pytest.raises(NonFiniteGradientError, match="infinite"):
            calls.call(5, "fail")
    assert counter.steps == 5


def test_a_call_that_comes_after_a_later_one_is_not_executed() -> None:
    counter = Counter()
    calls = NumberedCalls(counter)
    calls.call(2, "step", 1)
    with pytest.raises(AssertionError, match=r"call 1 .* came after call 2"):
        calls.call(1, "step", 1)
    assert counter.steps == 1
