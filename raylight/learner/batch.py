"""What a learner group is given for one update: the trajectories of a batch of rollouts. No torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from raylight.errors import EmptyTraceError
from raylight.traces.agents import filter_generations
from raylight.traces.trajectory import Relation, Trajectories, build_trajectories
from raylight.types import FinishedRollout, Trajectory

COUNTED_AS: dict[Relation, str] = {
    "extension": "extensions",
    "fork": "forks",
    "drift_ending": "drifts_ending",
    "drift_response": "drifts_response",
    "drift_header": "drifts_header",
    "restart": "restarts",
}
"""Fields of the report that count the relations of calls."""


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
    other_agents: int = 0
    """Calls of agents that are not trained, in all scored rollouts."""
    aborted: int = 0
    """Calls whose response was cut off, of trained agents, in all scored rollouts; they are not trained."""
    calls: int = 0
    """Calls that are trained. The counts below say how they relate to the calls before them (`traces.trajectory.Relation`); the
    first call of each rollout is in none of them."""
    extensions: int = 0
    forks: int = 0
    drifts_ending: int = 0
    drifts_response: int = 0
    drifts_header: int = 0
    restarts: int = 0

    @property
    def has_signal(self) -> bool:
        return self.groups > self.groups_without_signal


def build_batch(
    finished: list[FinishedRollout], failure_reward: float | None, min_group: int = 1, trained_agents: str | None = None
) -> tuple[TrainBatch, BatchReport]:
    """Turn finished rollouts into a batch.

    A failed rollout is left out, unless `failure_reward` gives it a reward and it has generations. Infrastructure failures
    are always left out. So are groups of which fewer than `min_group` rollouts remain: an estimator that compares within a
    group would take the reward of a single one for its advantage.

    Args:
        trained_agents: regular expression for the agents whose calls are trained, beside those that a rollout marked; None trains
            on all calls of a rollout that marked none.

    Raises:
        EmptyTraceError: rollouts were scored, but none called the model being trained, or none by an agent that is trained, or none
            to the end of a response.
    """
    kept: list[tuple[str, float, Trajectories]] = []
    failed = unscored = empty = other_agents = aborted = 0
    for item in finished:
        reward = scored(item, failure_reward)
        if reward is None:
            failed += item.rollout.status != "succeeded"
            unscored += item.rollout.status == "succeeded"
            continue
        generations = filter_generations(item, trained_agents)
        other_agents += len(item.generations) - len(generations)
        aborted += sum(call.finish_reason == "aborted" for call in generations)
        trajectories = build_trajectories(generations)
        if not trajectories.rows:
            empty += 1
            continue
        kept.append((item.rollout.group_id or item.rollout.rollout_id, reward, trajectories))
    if not kept and empty and aborted:
        raise EmptyTraceError(
            f"{empty} rollouts were scored, but all {aborted} calls that could be trained were cut off: agents, or what is between "
            "them and the engine, closed the connections; raise their timeouts, and look into the log of serving"
        )
    if not kept and empty and other_agents:
        raise EmptyTraceError(
            f"{empty} rollouts were scored, but all their {other_agents} calls are of agents that are not trained, or of agents "
            f"without a name: check trained_agents ({trained_agents!r}) and rollout.mark_agent_as_trainable, and name the agents "
            "that call (llm.for_agent, or spans with gen_ai.agent.name)"
        )
    if not kept and empty:
        raise EmptyTraceError(
            f"{empty} rollouts were scored, but none called the model being trained: the agent must use llm.endpoint as base URL, "
            "llm.api_key as key and llm.model as model"
        )
    sizes = Counter(group for group, _, _ in kept)
    compared = [item for item in kept if sizes[item[0]] >= min_group]
    groups, rewards = [group for group, _, _ in compared], [reward for _, reward, _ in compared]
    rows = [row for _, _, trajectories in compared for row in trajectories.rows]
    owners = [owner for owner, (_, _, trajectories) in enumerate(compared) for _ in trajectories.rows]
    related = Counter(relation for _, _, trajectories in compared for relation in trajectories.relations)
    report = BatchReport(
        trained=len(rewards), failed=failed, unscored=unscored, empty=empty, alone=len(kept) - len(compared),
        groups=len(set(groups)), groups_without_signal=_groups_without_signal(rewards, groups),
        other_agents=other_agents, aborted=aborted, calls=related.total(),
        **{COUNTED_AS[r]: n for r, n in related.items() if r in COUNTED_AS},
    )  # fmt: skip
    return TrainBatch(rewards, groups, rows, owners), report


def scored(item: FinishedRollout, failure_reward: float | None) -> float | None:
    """The reward that a rollout counts with: its own, `failure_reward` if its agent failed, or None if it is left out."""
    if item.rollout.status == "succeeded":
        return item.reward
    attempt = item.rollout.attempt
    infrastructure = attempt is None or attempt.failure is None or attempt.failure.kind in ("infrastructure", "cancelled")
    return None if infrastructure else failure_reward


def _groups_without_signal(rewards: list[float], groups: list[str]) -> int:
    seen: dict[str, set[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        seen.setdefault(group, set()).add(reward)
    return sum(len(values) == 1 for values in seen.values())
