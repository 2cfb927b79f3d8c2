"""What a learner group is given for one update: the trajectories of a batch of rollouts. Pure Python, no torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from raylight.errors import EmptyTraceError
from raylight.traces.trajectory import build_trajectories
from raylight.types import FinishedRollout, Trajectory


@dataclass(frozen=True)
class TrainBatch:
    """Rollouts with their rewards and trajectories.

    `rewards` and `groups` have one entry per rollout; `rows` are trajectories and `owners[i]` is the rollout that row i is of. A
    rollout may own several rows; its advantage is computed once and shared by them.
    """

    rewards: list[float]
    groups: list[str]
    rows: list[Trajectory]
    owners: list[int]


@dataclass(frozen=True)
class BatchReport:
    """What became of the rollouts of a batch; counts of rollouts unless the name says otherwise."""

    trained: int
    failed: int
    unscored: int
    """Succeeded without a reward."""
    empty: int
    """Made no call to the model being trained."""
    alone: int
    """Left without another rollout of their group to be compared with."""
    groups: int
    groups_without_signal: int
    """Groups in which all rewards are equal, so that no rollout is better than another."""

    @property
    def has_signal(self) -> bool:
        return self.groups > self.groups_without_signal


def build_batch(
    finished: list[FinishedRollout], failure_reward: float | None, min_group: int = 1
) -> tuple[TrainBatch, BatchReport]:
    """Turn finished rollouts into a batch.

    A failed rollout is left out, unless `failure_reward` gives it a reward and it has generations. Infrastructure failures
    are always left out. So are groups of which fewer than `min_group` rollouts remain: an estimator that compares within a
    group would take the reward of a single one for its advantage.

    Raises:
        EmptyTraceError: rollouts were scored, but none called the model being trained.
    """
    kept: list[tuple[str, float, list[Trajectory]]] = []
    failed = unscored = empty = 0
    for item in finished:
        reward = scored(item, failure_reward)
        if reward is None:
            failed += item.rollout.status != "succeeded"
            unscored += item.rollout.status == "succeeded"
            continue
        trajectories = build_trajectories(item.generations)
        if not trajectories:
            empty += 1
            continue
        kept.append((item.rollout.group_id or item.rollout.rollout_id, reward, trajectories))
    if not kept and empty:
        raise EmptyTraceError(
            f"{empty} rollouts were scored, but none called the model being trained: the agent must use llm.endpoint as base URL, "
            "llm.api_key as key and llm.model as model"
        )
    sizes = Counter(group for group, _, _ in kept)
    compared = [item for item in kept if sizes[item[0]] >= min_group]
    groups, rewards = [group for group, _, _ in compared], [reward for _, reward, _ in compared]
    rows = [row for _, _, trajectories in compared for row in trajectories]
    owners = [owner for owner, (_, _, trajectories) in enumerate(compared) for _ in trajectories]
    flat = _groups_without_signal(rewards, groups)
    report = BatchReport(len(rewards), failed, unscored, empty, len(kept) - len(compared), len(set(groups)), flat)
    return TrainBatch(rewards, groups, rows, owners), report


def scored(item: FinishedRollout, failure_reward: float | None) -> float | None:
    """The reward that a rollout counts with: its own, `failure_reward` if its agent failed, or None if it is left out."""
    if item.rollout.status == "succeeded":
        return item.reward
    attempt = item.rollout.attempt
    infrastructure = attempt is None or attempt.failure is None or attempt.failure.kind == "infrastructure"
    return None if infrastructure else failure_reward


def _groups_without_signal(rewards: list[float], groups: list[str]) -> int:
    seen: dict[str, set[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        seen.setdefault(group, set()).add(reward)
    return sum(len(values) == 1 for values in seen.values())
