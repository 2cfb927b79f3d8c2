"""Selection of recorded rollouts to learn from: by reward, the best of each group, or pairs of a group."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

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
        good = filter(self._is_good, lines)
        if not self.best_of_group:
            return [line.rollout_id for line in good]
        return [max(group, key=_reward).rollout_id for group in _groups(good)]

    def pairs(self, lines: Iterable[RolloutLine]) -> list[tuple[str, str]]:
        """Return the ids of the best and of the worst rollout of each group whose rewards differ."""
        scored = (line for line in lines if line.group_id is not None and self._is_scored(line))
        extremes = [(max(group, key=_reward), min(group, key=_reward)) for group in _groups(scored)]
        return [
            (best.rollout_id, worst.rollout_id)
            for best, worst in extremes
            if self._is_enough(best.reward) and best.reward > worst.reward
        ]

    def below_best(self, lines: Iterable[RolloutLine]) -> tuple[int, float]:
        """Return the number of selected rollouts with a lower reward than the best of their group, and the
        highest reward of all; (0, -inf) without rollouts."""
        groups = [[one.reward for one in group] for group in _groups(filter(self._is_good, lines))]
        best = list(map(max, groups))
        below = sum(len(group) - group.count(top) for group, top in zip(groups, best, strict=True))
        return below, max(best, default=-math.inf)

    def _is_scored(self, line: RolloutLine) -> bool:
        in_split = self.split in ("all", line.mode)
        return in_split and line.status == "succeeded" and line.reward is not None

    def _is_good(self, line: RolloutLine) -> bool:
        return self._is_scored(line) and self._is_enough(line.reward)

    def _is_enough(self, reward: float | None) -> bool:
        return self.min_reward is None or (reward is not None and reward >= self.min_reward)


class _Scored(NamedTuple):
    reward: float
    rollout_id: str


_reward = operator.attrgetter("reward")


def _groups(lines: Iterable[RolloutLine]) -> list[list[_Scored]]:
    """Return scored rollouts by group. A rollout without a group forms its own."""
    groups: dict[str, list[_Scored]] = {}
    for line in lines:
        assert line.reward is not None, "only scored rollouts are compared"
        groups.setdefault(line.group or line.rollout_id, []).append(_Scored(line.reward, line.rollout_id))
    return list(groups.values())
