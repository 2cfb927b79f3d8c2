"""Delays after losses to the infrastructure."""

from hypothesis import given
from hypothesis import strategies as st

from raylight.store.tables.transitions import FIRST_BACKOFF_S, MAX_BACKOFF_S, backoff_seconds
from raylight.types import RolloutConfig

IDS = st.text(max_size=30)


@given(st.integers(1, 10_000), IDS)
def test_a_delay_is_bounded(charged: int, attempt_id: str) -> None:
    delay = backoff_seconds(charged, attempt_id)
    assert FIRST_BACKOFF_S / 2 <= delay <= MAX_BACKOFF_S
    assert delay == backoff_seconds(charged, attempt_id)


@given(st.integers(1, 10_000), IDS, IDS)
def test_a_later_loss_never_waits_less_than_half_of_an_earlier_one(charged: int, one: str, two: str) -> None:
    assert backoff_seconds(charged + 1, two) >= backoff_seconds(charged, one) / 2


@given(st.lists(IDS, min_size=2, max_size=2))
def test_the_default_retries_outlast_the_detection_of_an_outage(attempts: list[str]) -> None:
    assert RolloutConfig().infrastructure_retries == 2
    assert sum(backoff_seconds(n, attempt_id) for n, attempt_id in enumerate(attempts, start=1)) >= 5


def test_delays_of_a_batch_are_spread() -> None:
    delays = sorted(backoff_seconds(1, f"at-{number}") for number in range(64))
    assert delays[0] < 1.2 < 1.8 < delays[-1]
