"""Self-play: older versions of the policy as opponents, in a pool with Elo ratings."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, Self

from pydantic import Field, model_validator

from raylight._utils.bounds import MAX_COUNT, MAX_FACTOR, MAX_PROCESSES
from raylight.base_config import Config
from raylight.traces.reward_spans import MAX_REWARD
from raylight.types import JsonObject

OPPONENT = "opponent"
"""Name of the opponent's model for agents, and key of its step in a rollout's metadata."""
SCALE = 400.0
"""Difference of Elo ratings at which the stronger side scores ten times as much."""


class SelfPlay(Config):
    """Opponents of the policy (`opponents=`): named older versions of it, which
    the engines serve in addition to the current one. Their calls are recorded and never trained on."""

    every: int = Field(default=10, ge=1, le=MAX_COUNT)
    """Steps between versions that become opponents. The first is the initial model."""
    pool: int = Field(default=1, ge=1, le=MAX_PROCESSES)
    """Most opponents at a time. With 1, it is the last such version."""
    draw: Literal["rating", "uniform"] = "rating"
    """Choice of a group's opponent. rating: in proportion to p (1 - p) of the expected score p, so that
    equals meet most often (prioritized fictitious self-play, https://doi.org/10.1038/s41586-019-1724-z).
    uniform: each with the same probability."""
    rating: float = Field(default=16.0, gt=0, le=MAX_FACTOR)
    """Change of the Elo ratings for a result, in points for each difference from the expected score."""
    win_reward: float = Field(default=1.0, ge=-MAX_REWARD, le=MAX_REWARD)
    loss_reward: float = Field(default=0.0, ge=-MAX_REWARD, le=MAX_REWARD)
    """Rewards of a rollout that count as a score of 1 and of 0; those between, in proportion."""

    @model_validator(mode="after")
    def _check_rewards(self) -> Self:
        if self.loss_reward >= self.win_reward:
            raise ValueError(f"loss_reward={self.loss_reward:g} is not below win_reward={self.win_reward:g}")
        return self

    def score(self, reward: float) -> float:
        """Return the policy's score in a rollout with a reward, 0 to 1."""
        share = (reward - self.loss_reward) / (self.win_reward - self.loss_reward)
        return min(max(share, 0.0), 1.0)


@dataclass
class Opponent:
    """A version of the policy.

    Attributes:
        step: the step after which the policy was this version.
        version: number of its weights.
        rating: Elo rating.
    """

    step: int
    version: int
    rating: float
    games: int = 0


class OpponentPool:
    """The opponents and their ratings.

    Law: what it draws depends on its state, the seed and the number of the group only, so that steps can be
    taken again.

    Args:
        seed: of the draws.
    """

    def __init__(self, settings: SelfPlay, seed: int) -> None:
        self._settings, self._seed = settings, seed
        self.rating = 0.0
        """Elo rating of the current policy."""
        self.opponents: list[Opponent] = []
        """In the order of their steps."""

    def is_due(self, step: int) -> bool:
        """Return True if the policy after a step becomes an opponent."""
        return step % self._settings.every == 0 and all(one.step < step for one in self.opponents)

    def add(self, step: int, version: int) -> int | None:
        """Add the policy after a step, with its rating; return the step of the opponent that leaves for it:
        the one with the lowest rating, the older of equals."""
        self.opponents.append(Opponent(step, version, self.rating))
        return self._remove_weakest() if len(self.opponents) > self._settings.pool else None

    def _remove_weakest(self) -> int:
        """Remove an opponent other than the newest; return its step."""
        weakest = min(self.opponents[:-1], key=lambda one: (one.rating, one.step))
        self.opponents.remove(weakest)
        return weakest.step

    def draw(self, group: int) -> int:
        weights = [1.0] * len(self.opponents)
        if self._settings.draw == "rating":
            chances = [expected_score(self.rating, one.rating) for one in self.opponents]
            weights = [chance * (1 - chance) for chance in chances]
        return random.Random(f"{self._seed}-{group}").choices(self.opponents, weights)[0].step

    def record(self, results: Iterable[tuple[int, float]]) -> None:
        """Change the ratings by results, in their order.

        Args:
            results: step of the opponent and reward of each rollout. Opponents that have left are
                ignored.
        """
        known = {one.step: one for one in self.opponents}
        for step, reward in results:
            if (opponent := known.get(step)) is None:
                continue
            expected = expected_score(self.rating, opponent.rating)
            change = self._settings.rating * (self._settings.score(reward) - expected)
            self.rating += change
            opponent.rating -= change
            opponent.games += 1

    def metrics(self) -> dict[str, float]:
        """Return the ratings and the size of the pool."""
        ratings = [one.rating for one in self.opponents]
        return {
            "opponents/rating": self.rating,
            "opponents/best_rating": max(ratings),
            "opponents/mean_rating": sum(ratings) / len(ratings),
            "opponents/pool": float(len(ratings)),
            "opponents/newest_step": float(self.opponents[-1].step),
        }

    def state_dict(self) -> JsonObject:
        return {"rating": self.rating, "opponents": [asdict(one) for one in self.opponents]}

    def load_state_dict(self, state: JsonObject) -> None:
        """Continue from the result of `state_dict`; an empty one stands for a run's start. From a larger
        pool, before a resume with another setting, the weakest leave."""
        self.rating = state.get("rating", 0.0)
        self.opponents = [Opponent(**one) for one in state.get("opponents", ())]
        while len(self.opponents) > self._settings.pool:
            self._remove_weakest()


def model_of_call(served: str) -> str:
    """Return the model that a call of a training rollout stands for: the named one, or the opponent for an
    older version of the policy, which has an "@" in its name."""
    model, is_older, _ = served.partition("@")
    return OPPONENT if is_older else model


def expected_score(own: float, other: float) -> float:
    """Return the expected score of a side by the Elo ratings of both, 0 to 1."""
    return 1.0 / (1.0 + 10.0 ** ((other - own) / SCALE))
