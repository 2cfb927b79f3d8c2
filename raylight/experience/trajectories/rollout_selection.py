"""Selection of recorded rollouts to learn from: by reward, the best of each group, or pairs of a group."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from raylight.store.overview import RolloutLine


@dataclass(frozen=True)
class RolloutSelection:
    """Rules that select rollouts. Only those that succeeded and have a reward are considered.

    Args:
        split: mode of the rollouts, or "all".
        min_reward: smallest reward; None for no limit. In a pair it holds for the chosen rollout.
        best_of_group: only the highest reward of each group, the first one of several; a rollout without a
            group forms a group by itself.
    """

    split: str = "train"
    min_reward: float | None = None
    best_of_group: bool = False

    @property
    def takes_all(self) -> bool:
        """True if no rollout is left out for its reward."""
        return self.min_reward is None and not self.best_of_group

    def choose(self, lines: Iterable[RolloutLine]) -> list[str]:
        """Return the ids of the selected rollouts, in their order."""
        if not self.best_of_group:
            return [line.rollout_id for line in lines if self._is_good(line)]
        best: dict[str, tuple[float, str]] = {}
        for line in filter(self._is_good, lines):
            assert line.reward is not None
            group = _group(line)
            if group not in best or line.reward > best[group][0]:
                best[group] = line.reward, line.rollout_id
        return [rollout_id for _, rollout_id in best.values()]

    def pairs(self, lines: Iterable[RolloutLine]) -> list[tuple[str, str]]:
        """Return the ids of the best and of the worst rollout of each group whose rewards differ."""
        best: dict[str, tuple[float, str]] = {}
        worst: dict[str, tuple[float, str]] = {}
        for line in lines:
            if line.group_id is None or not self._is_scored(line):
                continue
            group, reward = _group(line), _reward(line)
            for extremes, sign in ((best, 1), (worst, -1)):
                if group not in extremes or sign * (reward - extremes[group][0]) > 0:
                    extremes[group] = reward, line.rollout_id
        return [
            (rollout_id, worst[group][1])
            for group, (reward, rollout_id) in best.items()
            if self._is_enough(reward) and reward > worst[group][0]
        ]

    def below_best(self, lines: Iterable[RolloutLine]) -> tuple[int, float]:
        """Return the number of selected rollouts with a lower reward than the best of their group, and the
        highest reward of all; (0, -inf) without rollouts."""
        best: dict[str, tuple[float, int]] = {}
        count = 0
        for line in filter(self._is_good, lines):
            count += 1
            group, reward = _group(line), _reward(line)
            highest, ties = best.get(group, (reward, 0))
            if reward >= highest:
                best[group] = reward, ties + 1 if reward == highest else 1
        rewards = [reward for reward, _ in best.values()]
        return count - sum(ties for _, ties in best.values()), max(rewards, default=-math.inf)

    def _is_scored(self, line: RolloutLine) -> bool:
        in_split = self.split in ("all", line.mode)
        return in_split and line.status == "succeeded" and line.reward is not None

    def _is_good(self, line: RolloutLine) -> bool:
        return self._is_scored(line) and self._is_enough(_reward(line))

    def _is_enough(self, reward: float) -> bool:
        return self.min_reward is None or reward >= self.min_reward


def _group(line: RolloutLine) -> str:
    """Return the name of a rollout's group. A rollout without a group forms its own."""
    return line.group or line.rollout_id


def _reward(line: RolloutLine) -> float:
    assert line.reward is not None, "only scored rollouts are compared"
    return line.reward
