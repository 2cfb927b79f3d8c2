"""Scored rollouts of a step: their comparison with the others of their group, before a batch is built."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from raylight.experience.settings.advantages import BaselineKind
from raylight.experience.trajectories.reward_rules import TurnReward
from raylight.experience.trajectories.trajectory import Trajectories
from raylight.experience.trajectories.turns import CreditedTurn
from raylight.types import Trajectory


@dataclass(frozen=True, eq=False)
class ScoredRollout:
    """A rollout that may be trained."""

    rollout_id: str
    group: str
    reward: float
    parts: tuple[float, ...] | None
    """Named rewards that are normalised separately; None if only the reward counts."""
    compared: tuple[float, ...]
    """Values that differ between the rollouts of a group with signal."""
    sampled: Trajectories
    """Trajectories with the tokens that are too old."""
    trajectories: Trajectories
    turns: list[TurnReward]
    baseline: float | None
    tokens: int
    """Sampled tokens of all its calls."""
    auxiliary_tokens: int
    """Sampled tokens of its auxiliary calls, if they are not trained."""
    selected: range
    """Indices of the rows that are selected for training."""
    signal: float
    """The reward before a penalty that says nothing about the task."""
    calls: list[CreditedTurn]
    """Trained calls, for an estimator that credits turns; else empty."""
    agent: str | None = None
    """Agent whose part of a rollout this is; None for a whole rollout."""
    weight: float = 1.0
    """Factor of its advantages."""
    model: str = ""
    """Model whose part of a rollout this is, in a run with several."""

    @property
    def sampled_rows(self) -> list[Trajectory]:
        """Selected rows with the tokens that are too old."""
        return [self.sampled.rows[index] for index in self.selected]

    @property
    def rows(self) -> list[Trajectory]:
        """Selected rows."""
        return [self.trajectories.rows[index] for index in self.selected]

    @property
    def unselected_rows(self) -> list[Trajectory]:
        """Rows that are not selected."""
        return [row for index, row in enumerate(self.sampled.rows) if index not in self.selected]

    @property
    def total(self) -> float:
        """Sum of all rewards, exact, so that it does not depend on their order."""
        return math.fsum([self.reward, *(turn.value for turn in self.turns)])


def drop_without_baseline(
    scored: list[ScoredRollout], min_group: int, needs_baseline: bool
) -> list[ScoredRollout]:
    """Drop rollouts of groups that are too small or have no baseline."""
    sizes = Counter(item.group for item in scored)
    return [
        item
        for item in scored
        if sizes[item.group] >= min_group and not (needs_baseline and item.baseline is None)
    ]


def zero_variance_groups(rollouts: list[ScoredRollout], baseline_kind: BaselineKind) -> set[str]:
    """Return the groups in which all rewards are equal, with the greedy rollout's if it is the baseline."""
    compared: dict[str, list[tuple[float, ...]]] = {}
    for item in rollouts:
        own = compared.setdefault(item.group, [] if item.baseline is None else [(item.baseline,)])
        own.append(item.compared)
    return {group for group, values in compared.items() if not differ(values, baseline_kind)}


def differ(compared: Sequence[tuple[float, ...]], baseline_kind: BaselineKind) -> bool:
    """Return True if the values that are compared in a group differ, or if there is a single rollout, which
    an estimator without group baselines does not compare with others."""
    is_alone = len(compared) == 1 and baseline_kind in ("batch", "none")
    return is_alone or len(set(compared)) > 1


def has_signal(
    trained: list[ScoredRollout], owners: set[int], zero_variance: set[str], baseline_kind: BaselineKind
) -> bool:
    """True if the reward of any rollout with rows differs from its baseline.

    Args:
        owners: indices of the rollouts with rows.
    """
    with_rows = [trained[owner] for owner in owners]
    if baseline_kind == "group":
        return any(item.group not in zero_variance for item in with_rows)
    if baseline_kind == "batch":
        return bool(with_rows) and len({item.total for item in trained}) > 1
    if baseline_kind == "greedy":
        return any(item.total != item.baseline for item in with_rows)
    return bool(with_rows)
