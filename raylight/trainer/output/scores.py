"""Scores of rollouts by task: means and their errors, best of k, pass@k. Pure functions."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

from raylight.experience.trajectories.reward_rules import effective_reward
from raylight.types import FinishedRollout

NORMAL_95 = 1.96
"""Standard errors on either side of a mean that hold 95% of a normal distribution."""

Groups = list[list[float]]
"""Values of rollouts, by task."""


@dataclass(frozen=True)
class Spread:
    """Mean and spread of a reward over rollouts."""

    mean: float
    std: float
    """Standard deviation over rollouts."""
    error: float | None
    """Standard error of the mean; None for a single task. Rollouts of a task are not independent, so it is
    clustered by task (https://arxiv.org/abs/2411.00640)."""
    rollouts: int

    @property
    def interval(self) -> tuple[float, float] | None:
        """95% confidence interval of the mean; None without an error."""
        return (
            None
            if self.error is None
            else (self.mean - NORMAL_95 * self.error, self.mean + NORMAL_95 * self.error)
        )


@dataclass(frozen=True)
class Scores:
    """Scores of the rollouts of several tasks."""

    primary: Spread | None
    """The primary reward; None if no rollout was scored."""
    others: dict[str, Spread]
    """The other rewards by name, which may be `reward` too."""
    best_of: dict[int, float]
    """Expected maximum primary reward of k rollouts, mean over tasks."""
    pass_at: dict[int, float]
    """Probability that one of k rollouts passes, mean over tasks (https://arxiv.org/abs/2107.03374)."""
    tasks: int
    rollouts: int
    failed: int
    unscored: int
    """Number of rollouts that succeeded without a reward."""
    calls: int
    tokens: int
    """Number of sampled tokens of all calls."""


def measure(
    finished: list[FinishedRollout], samples: int, failure_reward: float | None, pass_reward: float
) -> Scores:
    """Score rollouts; rollouts of the same group have the same task.

    A rollout whose agent failed counts, see `reward_of_failures`. A failure of the infrastructure is always
    left out. A reward other than the primary one counts only where it was given. If fewer than k rollouts of
    a task are left, best of k and pass@k use these.

    Args:
        samples: rollouts per task, which is the highest k.
        pass_reward: lowest primary reward with which a rollout passes.
    """
    failure_reward = reward_of_failures(finished, failure_reward)
    primary: dict[str, list[float]] = {}
    others: dict[str, dict[str, list[float]]] = {}
    for item in finished:
        task = item.rollout.group_id or item.rollout.rollout_id
        if (reward := effective_reward(item, failure_reward)) is not None:
            primary.setdefault(task, []).append(reward)
        if item.rollout.status == "succeeded":
            for name, value in list(item.rewards.items())[1:]:
                others.setdefault(name, {}).setdefault(task, []).append(value)
    groups = list(primary.values())
    lengths = [len(call.output_ids) for item in finished for call in item.generations]
    return Scores(
        primary=spread(groups) if groups else None,
        others={name: spread(list(by_task.values())) for name, by_task in others.items()},
        best_of={k: _mean_best(groups, k) for k in numbers_to(samples) if groups},
        pass_at={
            k: _mean_best([[float(r >= pass_reward) for r in g] for g in groups], k)
            for k in numbers_to(samples)
            if groups
        },
        tasks=len({item.rollout.group_id or item.rollout.rollout_id for item in finished}),
        rollouts=len(finished),
        failed=sum(item.rollout.status != "succeeded" for item in finished),
        unscored=sum(item.rollout.status == "succeeded" and item.reward is None for item in finished),
        calls=len(lengths),
        tokens=sum(lengths),
    )


def reward_of_failures(finished: list[FinishedRollout], failure_reward: float | None) -> float | None:
    """Return the reward with which rollouts whose agent failed count in a score.

    If they were left out, a model that makes the agent fail on what it cannot do would be the best one.

    Args:
        failure_reward: the user's choice. None: 0, or the lowest reward of the others if that is negative;
            None as well if no other has a reward.
    """
    if failure_reward is not None:
        return failure_reward
    rewards = [reward for item in finished if (reward := effective_reward(item, None)) is not None]
    return min(0.0, *rewards) if rewards else None


def spread(groups: Groups) -> Spread:
    """Return mean, standard deviation and clustered error of values, one list for each task."""
    values = [value for group in groups for value in group]
    mean = statistics.fmean(values)
    error = None
    if len(groups) > 1:
        residuals = [sum(group) - len(group) * mean for group in groups]
        error = math.sqrt(sum(r * r for r in residuals) * len(groups) / (len(groups) - 1)) / len(values)
    return Spread(mean, statistics.pstdev(values), error, len(values))


def best_of(values: list[float], k: int) -> float:
    """Return the expected maximum of k values drawn from `values` without replacement; of all values if there
    are fewer."""
    n = len(values)
    k = min(k, n)
    return sum(value * math.comb(place, k - 1) for place, value in enumerate(sorted(values))) / math.comb(
        n, k
    )


def numbers_to(samples: int) -> list[int]:
    """Return the powers of two below `samples`, and `samples`."""
    return [2**power for power in range(samples.bit_length()) if 2**power < samples] + [samples]


def _mean_best(groups: Groups, k: int) -> float:
    return statistics.fmean(best_of(group, k) for group in groups)
