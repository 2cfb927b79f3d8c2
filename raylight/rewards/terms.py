"""Terms: small group rewards, and their weighted sum."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping

from raylight._utils.bounds import MAX_FACTOR
from raylight.errors import ConfigError
from raylight.rewards.group import GroupReward, GroupRollout, call_group_reward, identify
from raylight.rewards.process_reward import ProcessReward
from raylight.rewards.scoring_model import ScoringModel, find_reward_models


class RolloutTerm:
    """Group reward that scores each rollout by itself.

    Args:
        function: function from a rollout to its reward.
        arguments: of the term with this title, which made the function.
    """

    def __init__(
        self, function: Callable[[GroupRollout], object], title: str | None = None, **arguments: object
    ) -> None:
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ConfigError(f"each_rollout takes a plain function of one rollout, not {function!r:.80}")
        self._function = function
        self.__name__ = title or getattr(function, "__name__", type(function).__name__)
        self.identity = {title: arguments} if title else identify(function)

    def __call__(self, group: list[GroupRollout]) -> list[object]:
        return [self._function(rollout) for rollout in group]


def each_rollout(function: Callable[[GroupRollout], object]) -> RolloutTerm:
    """Return a group reward that calls a function of one rollout for each; also a decorator."""
    return RolloutTerm(function)


def agent_reward(name: str | None = None) -> RolloutTerm:
    """Return a term with the agent's own reward.

    Args:
        name: name of the reward; None for the one that counts.
    """
    return RolloutTerm(
        lambda rollout: rollout.reward if name is None else rollout.rewards.get(name),
        "agent_reward",
        name=name,
    )


def matches(pattern: str, *, full: bool = False) -> RolloutTerm:
    """Return a format term: 1 if a regular expression is found in the last answer, else 0.

    Args:
        full: the pattern must match the whole answer.

    Raises:
        ConfigError: the pattern is malformed.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"the pattern {pattern!r} is not a regular expression: {error}") from None
    find = compiled.fullmatch if full else compiled.search
    return RolloutTerm(
        lambda rollout: float(find(rollout.answer) is not None), "matches", pattern=pattern, full=full
    )


def length_penalty(max_tokens: int, buffer: int) -> RolloutTerm:
    """Return a length term: 0 for up to `max_tokens - buffer` sampled tokens, falling to -1 at `max_tokens`.

    It is the penalty of DAPO (https://arxiv.org/abs/2503.14476) for any algorithm.

    Raises:
        ConfigError: the buffer is not between 1 and `max_tokens`.
    """
    if not 1 <= buffer <= max_tokens:
        raise ConfigError(f"buffer={buffer} must be from 1 to max_tokens={max_tokens}")

    def penalty(rollout: GroupRollout) -> float:
        return -min(max((rollout.sampled_tokens - (max_tokens - buffer)) / buffer, 0.0), 1.0)

    return RolloutTerm(penalty, "length_penalty", max_tokens=max_tokens, buffer=buffer)


class RelativeLength:
    """Length term relative to the group, after Kimi k1.5 (https://arxiv.org/abs/2501.12599).

    The shortest rollout gets 0.5 and the longest -0.5, but one that is not good at most 0. In a group of
    equal lengths all get 0.

    Args:
        good_from: smallest reward of the agent with which a rollout is good.
    """

    def __init__(self, good_from: float = 1.0) -> None:
        self._good_from = self.identity = good_from

    def __call__(self, group: list[GroupRollout]) -> list[float]:
        lengths = [rollout.sampled_tokens for rollout in group]
        shortest, longest = min(lengths), max(lengths)
        if shortest == longest:
            return [0.0] * len(group)
        found = [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
        return [
            score if rollout.reward is not None and rollout.reward >= self._good_from else min(score, 0.0)
            for score, rollout in zip(found, group, strict=True)
        ]


class RewardSum:
    """Weighted sum of group rewards, as a group reward.

    Each rollout gets the reward `total`, and each term's by its name, as GDPO reads them. The named rewards
    of a term after its first one keep their names. A rollout that a term does not score is not scored.

    Args:
        terms: group rewards by name.
        weights: weight of each name; 1 for one that is missing.

    Raises:
        ConfigError: no term is given, or a weight is not finite or names no term.
    """

    def __init__(self, terms: Mapping[str, GroupReward], weights: Mapping[str, float] | None = None) -> None:
        weights = dict(weights or {})
        if process := [name for name, term in terms.items() if isinstance(term, ProcessReward)]:
            raise ConfigError(
                f"the terms {', '.join(process)} score turns, and a sum is of whole rollouts; give the sum "
                "to each_turn as final="
            )
        if not terms or not all(callable(term) for term in terms.values()) or "total" in terms:
            raise ConfigError(
                f"RewardSum has the terms {dict(terms)!r:.80}; give functions of a group by name, none of "
                "them named 'total'"
            )
        if wrong := [name for name, weight in weights.items() if name not in terms or not _is_weight(weight)]:
            raise ConfigError(
                f"the weights of {', '.join(wrong)} are of no term, or no finite number; the terms are "
                f"{', '.join(terms)}"
            )
        self._terms, self._weights = dict(terms), {name: weights.get(name, 1.0) for name in terms}
        self.identity = [{name: identify(term) for name, term in terms.items()}, self._weights]

    @property
    def reward_models(self) -> list[ScoringModel]:
        """The reward models among the terms."""
        return [model for term in self._terms.values() for model in find_reward_models(term)]

    async def __call__(self, group: list[GroupRollout]) -> list[dict[str, float] | None]:
        scored = {name: await call_group_reward(term, group) for name, term in self._terms.items()}
        return [
            self._combine({name: rewards[index] for name, rewards in scored.items()})
            for index in range(len(group))
        ]

    def _combine(self, found: dict[str, dict[str, float]]) -> dict[str, float] | None:
        if not all(found.values()):
            return None
        values = {name: next(iter(rewards.values())) for name, rewards in found.items()}
        others = {
            key: value
            for rewards in found.values()
            for key, value in list(rewards.items())[1:]
            if key != "total"
        }
        total = math.fsum(self._weights[name] * value for name, value in values.items())
        return {"total": total} | others | values


def _is_weight(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) <= MAX_FACTOR
