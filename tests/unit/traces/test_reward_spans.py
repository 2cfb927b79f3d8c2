"""Rewards: checks of values, and reading from spans of every known format; malformed ones are ignored."""

import json
import logging
import math
from fractions import Fraction
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace import TracerProvider

from raylight.errors import RewardError
from raylight.semconv import ANNOTATION, reward_attributes
from raylight.traces.reward_spans import (
    NamedReward,
    find_final_reward,
    find_reward_spans,
    get_reward_value,
    get_rewards_from_span,
    is_reward_span,
    named_rewards,
)
from raylight.types import Span

R = "agentlightning.reward"
FINITE = st.floats(min_value=-1e9, max_value=1e9)


def span(attributes: dict[str, Any], name: str = ANNOTATION) -> Span:
    return Span.from_attributes(attributes=attributes, name=name)


def ended(attributes: dict[str, Any] | None, name: str = ANNOTATION) -> Any:
    """Return the same span as a ReadableSpan of the SDK."""
    made = TracerProvider().get_tracer("t").start_span(name, attributes=attributes)
    made.end()
    return made


@given(st.dictionaries(st.text(max_size=10), FINITE, min_size=1, max_size=12))
def test_what_was_given_is_read_back(rewards: dict[str, float]) -> None:
    attributes = reward_attributes(named_rewards(rewards))
    for made in (span(attributes), ended(attributes)):
        assert [(reward.name, reward.value) for reward in get_rewards_from_span(made)] == list(
            rewards.items()
        )
        assert get_reward_value(made) == next(iter(rewards.values()))
        assert is_reward_span(made)


@given(st.dictionaries(st.text(max_size=5), FINITE, min_size=1), st.randoms())
def test_the_order_of_the_attributes_does_not_matter(rewards: dict[str, float], random: Any) -> None:
    items = list(reward_attributes(rewards).items())
    random.shuffle(items)
    assert {reward.name: reward.value for reward in get_rewards_from_span(span(dict(items)))} == rewards
    assert get_reward_value(span(dict(items))) == next(iter(rewards.values()))


@given(st.lists(st.one_of(st.none(), FINITE), max_size=10))
def test_the_final_reward_is_that_of_the_last_reward_span(values: list[float | None]) -> None:
    spans = [span({} if value is None else reward_attributes({"r": value})) for value in values]
    rewards = [value for value in values if value is not None]
    assert find_final_reward(spans) == (rewards[-1] if rewards else None)
    assert find_reward_spans(iter(spans)) == [
        made for made, value in zip(spans, values, strict=True) if value is not None
    ]


@pytest.mark.parametrize(
    "attributes",
    [
        {f"{R}.0.name": "a"},
        {f"{R}.0.value": 1.0},
        {f"{R}.0.name": 3, f"{R}.0.value": 1.0},
        {f"{R}.0.name": "a", f"{R}.0.value": "1"},
        {f"{R}.0.name": "a", f"{R}.0.value": math.nan},
        {f"{R}.0.name": "a", f"{R}.0.value": [1.0]},
        {f"{R}.0.name": "a", f"{R}.0.value": None},
        {f"{R}.1.name": "a", f"{R}.1.value": 1.0},
        {f"{R}.x.name": "a", f"{R}.x.value": 1.0},
        {f"{R}.": 1.0},
        {f"{R}.0.name": "a", f"{R}.0.value": 1.0, f"{R}.2.name": "b", f"{R}.2.value": 1.0},
        {f"{R}.0.name": "a", f"{R}.0.value": 1.0, f"{R}.1.name": "b"},
    ],
)
def test_a_malformed_reward_is_logged_and_is_none(
    attributes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    good = span(reward_attributes({"r": 0.5}))
    with caplog.at_level(logging.WARNING, "raylight"):
        assert find_final_reward([good, span(attributes)]) == 0.5
    assert "is ignored" in caplog.text
    assert find_reward_spans([good, span(attributes)]) == [good]
    assert get_rewards_from_span(span(attributes)) == []


def test_further_fields_of_a_reward_and_integers_are_fine() -> None:
    made = span({f"{R}.0.name": "a", f"{R}.0.value": 1, f"{R}.0.unit": "points", "agentlightning.rewards": 3})
    assert get_rewards_from_span(made) == [NamedReward(name="a", value=1.0)]


@pytest.mark.parametrize("make", [span, ended])
def test_older_formats(make: Any) -> None:
    assert get_rewards_from_span(make({"reward": 0.5})) == [NamedReward(name="primary", value=0.5)]
    assert get_reward_value(make({"reward": 0.5}, "another.span")) is None
    for key in ("agentops.task.output", "agentops.entity.output"):
        made = make({key: json.dumps({"type": "reward", "value": 2})}, "reward.task")
        assert get_reward_value(made) == 2.0
        assert find_final_reward([made]) == 2.0
    assert get_reward_value(span({"agentops.task.output": {"type": "reward", "value": 1.5}})) == 1.5


@pytest.mark.parametrize(
    "output",
    [
        "the answer",
        '{"type": "reward"',
        '["reward"]',
        "3",
        '{"type": "answer", "value": 1}',
        '{"type": "reward", "value": null}',
        '{"type": "reward", "value": "good"}',
        "[" * 100_000,
    ],
)
def test_other_outputs_are_no_rewards(output: str) -> None:
    assert not is_reward_span(span({"agentops.task.output": output}, "x"))


@pytest.mark.parametrize(
    "made", [ended(None), ended({}), span({}), span({"reward": "good"}), span({"reward": True}, "x")]
)
def test_spans_without_reward(made: Any) -> None:
    assert get_reward_value(made) is None
    assert find_final_reward([made]) is None


def test_attributes_may_be_any_mapping() -> None:
    class Foreign:
        name = "x"
        attributes = MappingProxyType(reward_attributes({"r": 1.0}))

    assert get_reward_value(Foreign()) == 1.0


# checking


@pytest.mark.parametrize(
    ("given_", "value"),
    [
        (1, 1.0),
        (True, 1.0),
        (-0.5, -0.5),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (Fraction(1, 2), 0.5),
    ],
)
def test_numbers_are_rewards(given_: Any, value: float) -> None:
    assert named_rewards(given_) == {"primary": value}
    assert type(named_rewards(given_)["primary"]) is float


@pytest.mark.parametrize(
    "value", ["1", None, [1.0], 1j, math.nan, math.inf, -math.inf, 10**400, np.array([1.0]), np.nan, object()]
)
def test_other_things_are_not(value: Any) -> None:
    for reward in (value, {"style": value}):
        if reward is not None:
            with pytest.raises(RewardError, match=r"the reward '(primary|style)' is .*(give|must be) a"):
                named_rewards(reward)


def test_the_primary_one_comes_first() -> None:
    assert list(named_rewards({"a": 1, "b": 2, "c": 3}, "b").items()) == [("b", 2.0), ("a", 1.0), ("c", 3.0)]
    assert list(named_rewards({"a": 1, "b": 2})) == ["a", "b"]
    with pytest.raises(RewardError, match="'z' is not among the rewards 'a', 'b'"):
        named_rewards({"a": 1, "b": 2}, "z")
    with pytest.raises(RewardError, match="empty"):
        named_rewards({})
    with pytest.raises(RewardError, match="needs a dict of rewards"):
        named_rewards(1.0, "a")
