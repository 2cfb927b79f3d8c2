"""The nouns: state tables, the invariant of a generation, the final reward."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from unit_helpers import make_generation, make_key, make_rollout

from raylight import semconv
from raylight.errors import ConfigError
from raylight.types import (
    ATTEMPT_FINISHED,
    ATTEMPT_TRANSITIONS,
    FINISHED,
    ROLLOUT_TRANSITIONS,
    WAITING,
    RolloutConfig,
    RolloutRequest,
    Span,
    Trajectory,
    find_final_reward,
)

TABLES = pytest.mark.parametrize(
    ("table", "start"), [(ROLLOUT_TRANSITIONS, "queuing"), (ATTEMPT_TRANSITIONS, "preparing")], ids=["rollout", "attempt"]
)


def reachable(table: dict, start: str) -> set:
    seen, new = set(), {start}
    while new:
        seen |= new
        new = {after for status in new for after in table[status]} - seen
    return seen


@TABLES
def test_every_status_is_reachable_and_none_is_unknown(table: dict, start: str) -> None:
    assert reachable(table, start) == set(table)


@TABLES
def test_an_end_can_be_reached_from_every_status(table: dict, start: str) -> None:
    ends = {status for status, following in table.items() if not following}
    assert ends
    assert all(reachable(table, status) & ends for status in table)


def test_terminal_statuses_have_no_exit_and_are_the_finished_ones() -> None:
    assert {"succeeded", "failed", "cancelled"} == FINISHED
    assert {"succeeded", "failed", "timeout"} == ATTEMPT_FINISHED
    assert all(not ROLLOUT_TRANSITIONS[status] for status in FINISHED)
    assert all(not ATTEMPT_TRANSITIONS[status] for status in ATTEMPT_FINISHED)


def test_only_waiting_rollouts_can_be_prepared() -> None:
    assert {status for status, following in ROLLOUT_TRANSITIONS.items() if "preparing" in following} == WAITING


def test_every_undecided_rollout_can_be_cancelled() -> None:
    assert {status for status, following in ROLLOUT_TRANSITIONS.items() if "cancelled" in following} == set(
        ROLLOUT_TRANSITIONS
    ) - FINISHED


@pytest.mark.parametrize(("logprobs", "versions"), [([-1.0], [0, 0]), ([-1.0, -1.0], [0]), ([], []), ([-1.0] * 3, [0, 0])])
def test_a_generation_has_a_logprob_and_a_version_for_every_token(logprobs: list, versions: list) -> None:
    with pytest.raises(ValueError, match="equally many"):
        make_generation([1], [2, 3], logprobs=logprobs, versions=versions, key=make_key(call_id="c-7"))


def test_an_empty_generation_is_one() -> None:
    assert make_generation([1], []).output_ids == []


def test_the_temperature_of_the_most_probable_token_is_one() -> None:
    assert make_generation([1], [2], temperature=0.0).temperature == 1.0
    assert make_generation([1], [2], temperature=0.3).temperature == 0.3


def span(attributes: dict) -> Span:
    return Span(rollout_id="r", attempt_id="a", name="s", attributes=attributes, start_time=0, end_time=1)


def test_the_final_reward_is_the_primary_one_of_the_last_span_that_has_one() -> None:
    spans = [
        span(semconv.reward_attributes({"main": 1.0, "style": 9.0})),
        span(semconv.reward_attributes({"main": 2.0, "style": 8.0})),
        span({"something": "else"}),
    ]
    assert find_final_reward(spans) == 2.0
    assert find_final_reward(spans[2:]) is None
    assert find_final_reward([]) is None


def test_a_reward_of_zero_is_a_reward() -> None:
    assert find_final_reward([span(semconv.reward_attributes({"reward": 0.0}))]) == 0.0


def test_the_span_of_rewards_belongs_to_its_attempt_and_keeps_every_name() -> None:
    attempt = make_rollout("r-9", attempt_id="a-9").attempt
    made = Span.of_rewards(attempt, {"main": 0.5, "style": -1.0}, now=12.0)
    assert (made.rollout_id, made.attempt_id, made.start_time) == ("r-9", "a-9", 12.0)
    assert find_final_reward([made]) == 0.5
    assert set(made.attributes.values()) == {"main", 0.5, "style", -1.0}


def test_a_trajectory_counts_what_it_trains() -> None:
    trajectory = Trajectory("r", [5, 6, 7, 8], [0, 0, 1, 1], [0.0, 0.0, -1.0, -1.0], [-1, -1, 0, 0])
    assert trajectory.prompt_length == 2
    assert trajectory.trained_tokens == 2


@pytest.mark.parametrize("wrong", [{"max_attempts": 0}, {"timeout_seconds": 0}, {"retry_on": {"boredom"}}, {"retries": 3}])
def test_a_rollout_config_refuses_what_it_cannot_mean(wrong: dict) -> None:
    with pytest.raises(ConfigError, match="RolloutConfig"):
        RolloutConfig(**wrong)


def test_a_request_refuses_an_unknown_field_and_mode() -> None:
    with pytest.raises(ValidationError):
        RolloutRequest(input=1, colour="red")
    with pytest.raises(ValidationError):
        RolloutRequest(input=1, mode="play")
