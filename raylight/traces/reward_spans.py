"""Checks of rewards, and reading of rewards from spans of raylight and agent-lightning 0.2 and 0.3."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Protocol, TypeVar

from pydantic import BaseModel

from raylight.errors import RewardError, RewardTypeError
from raylight.semconv import ANNOTATION, PRIMARY, REWARD_AGENT, REWARD_PREFIX

logger = logging.getLogger(__name__)

MAX_REWARD = 1e9
"""Largest magnitude of a reward. Sums and squares of advantages over the tokens of a batch stay finite in
float32."""
_PREFIX = f"{REWARD_PREFIX}."
LEGACY_REWARD = "reward"
"""Attribute of an annotation span in which agent-lightning 0.2 stored its only reward."""
AGENTOPS_OUTPUTS = ("agentops.task.output", "agentops.entity.output")
"""Attributes in which AgentOps stores `{"type": "reward", "value": ...}` as JSON."""


class SpanLike(Protocol):
    """Protocol of spans: raylight's `Span` and OpenTelemetry's `ReadableSpan`."""

    @property
    def name(self) -> str: ...

    @property
    def attributes(self) -> Mapping[str, object] | None: ...


SpanT = TypeVar("SpanT", bound=SpanLike)


class NamedReward(BaseModel):
    """A reward with its name."""

    name: str
    value: float


def as_reward(value: object, name: str = PRIMARY) -> float:
    """Convert a number (also a bool, or a scalar of numpy or torch) to a float within `MAX_REWARD`.

    Args:
        value: the reward.
        name: name of the reward, for the error message.

    Raises:
        RewardTypeError: the value is not a number.
        RewardError: the value is not finite, or its magnitude is over `MAX_REWARD`.
    """
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        raise RewardTypeError(
            f"the reward {name!r} is {value!r:.80} of type {type(value).__name__}; give a float"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(f"the reward {name!r} is {number}; a reward must be a finite float")
    if abs(number) > MAX_REWARD:
        raise RewardError(
            f"the reward {name!r} is {number:g}, and its magnitude must be at most {MAX_REWARD:g}; scale it, "
            "or clip it"
        )
    return number


def named_rewards(reward: object, primary_key: str | None = None) -> dict[str, float]:
    """Return rewards by name, with the primary one first.

    Args:
        reward: a number, which gets the name `primary`, or a dict of numbers.
        primary_key: name of the primary reward. None: the first.

    Raises:
        RewardError: a reward is not a finite number within `MAX_REWARD`, the dict is empty, or it lacks
            `primary_key`.
    """
    if not isinstance(reward, Mapping):
        if primary_key is not None:
            raise RewardError(
                f"primary_key={primary_key!r} needs a dict of rewards, but the reward is {reward!r:.80}; "
                "give a dict, or no primary_key"
            )
        return {PRIMARY: as_reward(reward)}
    if not reward:
        raise RewardError("the dict of rewards is empty; give at least one reward, or None instead of a dict")
    named = {str(name): as_reward(value, str(name)) for name, value in reward.items()}
    if primary_key is None:
        return named
    if primary_key not in named:
        raise RewardError(
            f"primary_key={primary_key!r} is not among the rewards {', '.join(map(repr, named))}"
        )
    return {primary_key: named.pop(primary_key), **named}


def get_rewards_from_span(span: SpanLike) -> list[NamedReward]:
    """Return all rewards of a span, with the primary one first.

    The list is empty if the span has none, or one of an agent (`emit_reward(..., agent=...)`). Rewards that
    cannot be read are logged and ignored.
    """
    return [] if REWARD_AGENT in (span.attributes or {}) else get_any_rewards(span)


def get_any_rewards(span: SpanLike) -> list[NamedReward]:
    """Return all rewards of a span, single agents' included, with the primary one first.

    Rewards that cannot be read are logged and ignored.
    """
    try:
        return _read_rewards(span)
    except RewardError as error:
        logger.warning("the reward of span %r is ignored: %s", span.name, error)
        return []


def has_reward(span: SpanLike) -> bool:
    """Return True if a span has a reward, also one of an agent.

    Raises:
        RewardError: the span has the attributes of a reward, and the reward cannot be read.
    """
    return bool(_read_rewards(span))


def _read_rewards(span: SpanLike) -> list[NamedReward]:
    attributes = span.attributes
    if not attributes:
        return []
    keys = [key for key in attributes if key.startswith(_PREFIX)]
    if keys:
        return _indexed(attributes, keys)
    value = _legacy_value(span.name, attributes)
    return [] if value is None else [NamedReward(name=PRIMARY, value=as_reward(value))]


def _indexed(attributes: Mapping[str, object], keys: list[str]) -> list[NamedReward]:
    """Return the rewards under `agentlightning.reward.N.name` and `.value`, where N counts from 0."""
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


def _legacy_value(name: str, attributes: Mapping[str, object]) -> object:
    """Return the reward that AgentOps or agent-lightning 0.2 recorded; None if there is none."""
    for key in AGENTOPS_OUTPUTS:
        output = attributes.get(key)
        if output is None:
            continue
        if isinstance(output, str):
            try:
                output = json.loads(output)
            except (ValueError, RecursionError):  # not JSON, so it is the agent's text
                output = None
        if isinstance(output, Mapping) and output.get("type") == "reward":
            value = output.get("value")
            return value if isinstance(value, Real) else None  # other values are the agent's own text
    return attributes.get(LEGACY_REWARD) if name == ANNOTATION else None


def get_reward_value(span: SpanLike) -> float | None:
    """Return the primary reward of a span; None if it has no reward."""
    rewards = get_rewards_from_span(span)
    return rewards[0].value if rewards else None


def is_reward_span(span: SpanLike) -> bool:
    """Return True if a span has a reward."""
    return bool(get_rewards_from_span(span))


def find_reward_spans(spans: Iterable[SpanT]) -> list[SpanT]:
    """Return the spans that have a reward, in order."""
    return [span for span in spans if is_reward_span(span)]


def find_final_reward(spans: Iterable[SpanLike]) -> float | None:
    """Return the primary reward of the last span that has one; None if there is none."""
    for span in reversed(list(spans)):
        value = get_reward_value(span)
        if value is not None:
            return value
    return None
