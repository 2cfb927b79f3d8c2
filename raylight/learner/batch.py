"""What a learner group is given for one update: the trajectories of a batch of rollouts. Pure Python, no torch."""

from __future__ import annotations

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
    groups: int
    groups_without_signal: int
    """Groups in which all rewards are equal, so that no rollout is better than another."""

    @property
    def has_signal(self) -> bool:
        return self.groups > self.groups_without_signal


def build_batch(finished: list[FinishedRollout], failure_reward: float | None) -> tuple[TrainBatch, BatchReport]:
    """Turn finished rollouts into a batch.

    A failed rollout is left out, unless `failure_reward` gives it a reward and it has generations. Infrastructure failures
    are always left out.

    Raises:
        EmptyTraceError: rollouts were scored, but none called the model being trained.
    """
    rewards: list[float] = []
    groups: list[str] = []
    rows: list[Trajectory] = []
    owners: list[int] = []
    failed = unscored = empty = 0
    for item in finished:
        reward = _reward(item, failure_reward)
        if reward is None:
            failed += item.rollout.status != "succeeded"
            unscored += item.rollout.status == "succeeded"
            continue
        trajectories = build_trajectories(item.generations)
        if not trajectories:
            empty += 1
            continue
        owners += [len(rewards)] * len(trajectories)
        rows += trajectories
        rewards.append(reward)
        groups.append(item.rollout.group_id or item.rollout.rollout_id)
    if not rows and empty:
        raise EmptyTraceError(
            f"{empty} rollouts were scored, but none called the model being trained: the agent must use llm.endpoint as base URL, "
            "llm.api_key as key and llm.model as model"
        )
    flat = _groups_without_signal(rewards, groups)
    report = BatchReport(len(rewards), failed, unscored, empty, len(set(groups)), flat)
    return TrainBatch(rewards, groups, rows, owners), report


def _reward(item: FinishedRollout, failure_reward: float | None) -> float | None:
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
