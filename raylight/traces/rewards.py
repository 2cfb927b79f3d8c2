"""Rewards: checking those that are given, and reading them from spans of raylight and of agent-lightning 0.2
and 0.3."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel

from raylight.errors import RewardError
from raylight.semconv import ANNOTATION, PRIMARY, REWARD_PREFIX

logger = logging.getLogger(__name__)

LEGACY_REWARD = "reward"
"""Attribute of an annotation span in which agent-lightning 0.2 kept its only reward."""
AGENTOPS_OUTPUTS = ("agentops.task.output", "agentops.entity.output")
"""Attributes in which AgentOps keeps `{"type": "reward", "value": ...}`, as JSON."""


class SpanLike(Protocol):
    """A span of raylight, or a `ReadableSpan` of OpenTelemetry."""

    @property
    def name(self) -> str: ...

    @property
    def attributes(self) -> Mapping[str, Any] | None: ...


AnySpan = TypeVar("AnySpan", bound=SpanLike)


class NamedReward(BaseModel):
    """One dimension of a reward."""

    name: str
    value: float


def as_reward(value: Any, name: str = PRIMARY) -> float:
    """A finite float from a number (a bool, or a scalar of numpy or torch, is one too).

    Raises:
        RewardError: it is something else; the message says which reward, by `name`.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        raise RewardError(
            f"the reward {name!r} is {value!r:.80} of type {type(value).__name__}; give a float"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"the reward {name!r} is {value!s:.40}; a reward must be a finite float")
    return number


def named_rewards(reward: Any, primary_key: str | None = None) -> dict[str, float]:
    """Rewards by name, the primary one first.

    Args:
        reward: a number, which gets the name `primary`, or a dict of numbers.
        primary_key: the name of the primary one; None takes the first.

    Raises:
        RewardError: a reward is not a finite number, there is none, or the primary one is not among them.
    """
    if not isinstance(reward, Mapping):
        if primary_key is not None:
            raise RewardError(
                f"primary_key={primary_key!r} chooses from a dict of rewards, but the reward is "
                f"{reward!r:.80}"
            )
        return {PRIMARY: as_reward(reward)}
    if not reward:
        raise RewardError("the dict of rewards is empty; give at least one, or none at all")
    named = {str(name): as_reward(value, str(name)) for name, value in reward.items()}
    if primary_key is None:
        return named
    if primary_key not in named:
        raise RewardError(
            f"primary_key={primary_key!r} is not among the rewards {', '.join(map(repr, named))}"
        )
    return {primary_key: named.pop(primary_key), **named}


def get_rewards_from_span(span: SpanLike) -> list[NamedReward]:
    """All rewards of a span, the primary one first; empty if it carries none, or none that can be read (this
    is logged)."""
    attributes = span.attributes
    if not attributes:
        return []
    keys = [key for key in attributes if key.startswith(f"{REWARD_PREFIX}.")]
    try:
        if keys:
            return _indexed(attributes, keys)
        value = _legacy_value(span.name, attributes)
        return [] if value is None else [NamedReward(name=PRIMARY, value=as_reward(value))]
    except RewardError as error:
        logger.warning("span %r is not taken for a reward: %s", span.name, error)
        return []


def _indexed(attributes: Mapping[str, Any], keys: list[str]) -> list[NamedReward]:
    """Rewards under `agentlightning.reward.N.name` and `.value`, where N counts from 0."""
    indices = {key.split(".")[2] for key in keys}
    if indices != {str(i) for i in range(len(indices))}:
        raise RewardError(
            f"the indices of {REWARD_PREFIX}.N are {', '.join(sorted(indices))}; they must count from 0"
        )
    rewards = []
    for index in range(len(indices)):
        name = attributes.get(f"{REWARD_PREFIX}.{index}.name")
        if not isinstance(name, str):
            raise RewardError(f"{REWARD_PREFIX}.{index}.name is {name!r:.80}; it must be a string")
        rewards.append(
            NamedReward(name=name, value=as_reward(attributes.get(f"{REWARD_PREFIX}.{index}.value"), name))
        )
    return rewards


def _legacy_value(name: str, attributes: Mapping[str, Any]) -> Any:
    """What AgentOps or agent-lightning 0.2 recorded as reward; None if nothing."""
    for key in AGENTOPS_OUTPUTS:
        output = attributes.get(key)
        if isinstance(output, str):
            try:
                output = json.loads(output)
            except (
                ValueError,
                RecursionError,
            ):  # an output that is no JSON is the text that the agent answered
                output = None
        if isinstance(output, Mapping) and output.get("type") == "reward":
            return output.get("value")
    return attributes.get(LEGACY_REWARD) if name == ANNOTATION else None


def get_reward_value(span: SpanLike) -> float | None:
    """The primary reward of a span; None if it carries no reward."""
    rewards = get_rewards_from_span(span)
    return rewards[0].value if rewards else None


def is_reward_span(span: SpanLike) -> bool:
    """Whether a span carries a reward."""
    return bool(get_rewards_from_span(span))


def find_reward_spans(spans: Iterable[AnySpan]) -> list[AnySpan]:
    """Spans that carry a reward, in their order."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Iterable[SpanLike]) -> float | None:
    """The primary reward of the last span that carries one; None if none does."""
    for span in reversed(list(spans)):
        value = get_reward_value(span)
        if value is not None:
            return value
    return None
