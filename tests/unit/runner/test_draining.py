"""Time that runners of a draining node have."""

import pytest

from raylight.runner.draining import grace_seconds


@pytest.mark.parametrize(
    ("patience", "remaining", "expected"),
    [(60, None, 60), (60, 120, 60), (60, 30, 25), (60, 3, 0), (60, -10, 0), (0, None, 0)],
)
def test_runners_have_given_back_their_rollouts_before_the_node_ends(
    patience: float, remaining: float | None, expected: float
) -> None:
    assert grace_seconds(patience, remaining) == expected
