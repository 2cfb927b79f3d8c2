"""What a learner group is given for one update: the trajectories of a batch of rollouts. No torch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from raylight.errors import EmptyTraceError
from raylight.experience.registry import BaselineKind
from raylight.experience.row_limit import LongRows, RowLimit
from raylight.experience.trajectory import Relation, Trajectories, build_trajectories
from raylight.experience.turn_rewards import TurnReward, turn_rewards_of
from raylight.traces.trained_agents import filter_generations
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

    `rewards`, `groups` and `baselines` have one entry per rollout; `rows` are trajectories and `owners[i]` is the rollout that row
    i is of. A rollout may own several rows, or none where they were too long; its advantage is computed once and shared by them.
    """

    rewards: list[float]
    groups: list[str]
    rows: list[Trajectory]
    owners: list[int]
    turn_rewards: list[TurnReward] = field(default_factory=list)
    """Rewards beside the final ones, which are in `rewards`."""
    baselines: list[float] | None = None
    """What a rollout's reward is compared with where that is not made of the others' rewards (ReMax)."""


@dataclass(frozen=True)
class BatchRules:
    """What becomes of rollouts.

    Args:
        failure_reward: of rollouts whose agent failed; None leaves them out.
        min_group: a group of which fewer rollouts remain is left out.
        trained_agents: regular expression for the agents whose calls are trained, beside those that a rollout marked; None trains
            on all calls of a rollout that marked none.
        row_limit: tokens of the longest row; None for no limit.
    """

    failure_reward: float | None = None
    min_group: int = 1
    trained_agents: str | None = None
    zero_variance_groups: Literal["keep", "drop"] = "keep"
    row_limit: int | None = None
    long_rows: LongRows = "error"
    turn_rewards: bool = False
    baseline_kind: BaselineKind = "group"


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
    """Left without another rollout of their group, or without the baseline, to be compared with."""
    groups: int
    groups_without_signal: int
    """Groups in which all rewards are equal, so that no rollout is better than another."""
    has_signal: bool
    """Whether there is anything to learn from."""
    equal: int = 0
    """Left out because all rewards of their group are equal."""
    other_agents: int = 0
    """Calls of agents that are not trained, in all scored rollouts."""
    aborted: int = 0
    """Calls whose response was cut off, of trained agents, in all scored rollouts; they are not trained."""
    rows_dropped: int = 0
    """Rows longer than the limit that were left out."""
    rows_truncated: int = 0
    """Rows that were cut off at the limit."""
    calls: int = 0
    """Calls that are trained. The counts below say how they relate to the calls before them (`traces.trajectory.Relation`); the
    first call of each rollout is in none of them."""
    extensions: int = 0
    forks: int = 0
    drifts_ending: int = 0
    drifts_response: int = 0
    drifts_header: int = 0
    restarts: int = 0


@dataclass(frozen=True, eq=False)
class _Kept:
    """A rollout that may be trained."""

    group: str
    reward: float
    trajectories: Trajectories
    turns: list[TurnReward]
    baseline: float | None

    @property
    def total(self) -> float:
        return math.fsum(
            [self.reward, *(turn.value for turn in self.turns)]
        )  # which does not depend on their order


def build_batch(
    finished: list[FinishedRollout],
    rules: BatchRules,
    reward_of: Callable[[FinishedRollout], float | None] | None = None,
    baselines: dict[str, float] | None = None,
) -> tuple[TrainBatch, BatchReport]:
    """Turn finished rollouts into a batch.

    A failed rollout is left out, unless `failure_reward` gives it a reward and it has generations. Infrastructure failures
    are always left out. So are groups of which fewer than `min_group` rollouts remain: an estimator that compares within a
    group would take the reward of a single one for its advantage.

    Args:
        reward_of: the reward of a rollout, None if it has none; `scored` if not given.
        baselines: by group; a group without one is left out. None if rollouts have no baselines.

    Raises:
        EmptyTraceError: rollouts were scored, but none called the model being trained, or none by an agent that is trained, or none
            to the end of a response.
        RowTooLongError: a row is longer than the limit, and `long_rows` is "error".
    """
    kept: list[_Kept] = []
    failed = unscored = empty = other_agents = aborted = 0
    for item in finished:
        reward = reward_of(item) if reward_of else scored(item, rules.failure_reward)
        if reward is None:
            failed += item.rollout.status != "succeeded"
            unscored += item.rollout.status == "succeeded"
            continue
        generations = filter_generations(item, rules.trained_agents)
        other_agents += len(item.generations) - len(generations)
        aborted += sum(call.finish_reason == "aborted" for call in generations)
        trajectories = build_trajectories(generations)
        if not trajectories.rows:
            empty += 1
            continue
        group = group_of(item)
        turns = turn_rewards_of(item, trajectories.places) if rules.turn_rewards else []
        kept.append(_Kept(group, reward, trajectories, turns, (baselines or {}).get(group)))
    if not kept and empty:
        raise EmptyTraceError(_why_empty(empty, aborted, other_agents, rules.trained_agents))
    baseline_kind = _comparable(kept, rules.min_group, baselines is not None)
    same = _equal_groups([item.group for item in baseline_kind], [item.total for item in baseline_kind])
    trained = (
        [item for item in baseline_kind if item.group not in same]
        if rules.zero_variance_groups == "drop"
        else baseline_kind
    )
    limit = RowLimit(rules.row_limit, rules.long_rows)
    batch = _as_batch(trained, limit, baselines is not None)
    related = Counter(relation for item in trained for relation in item.trajectories.relations)
    report = BatchReport(
        trained=len(trained),
        failed=failed,
        unscored=unscored,
        empty=empty,
        alone=len(kept) - len(baseline_kind),
        groups=len({item.group for item in baseline_kind}),
        groups_without_signal=len(same),
        has_signal=bool(batch.rows) and _tells_apart(trained, same, rules.baseline_kind),
        equal=len(baseline_kind) - len(trained),
        other_agents=other_agents,
        aborted=aborted,
        rows_dropped=limit.dropped,
        rows_truncated=limit.truncated,
        calls=related.total(),
        **{COUNTED_AS[r]: n for r, n in related.items() if r in COUNTED_AS},
    )
    return batch, report


def scored(item: FinishedRollout, failure_reward: float | None) -> float | None:
    """The reward that a rollout counts with: its own, `failure_reward` if its agent failed, or None if it is left out."""
    if item.rollout.status == "succeeded":
        return item.reward
    attempt = item.rollout.attempt
    infrastructure = (
        attempt is None or attempt.failure is None or attempt.failure.kind in ("infrastructure", "cancelled")
    )
    return None if infrastructure else failure_reward


def group_of(item: FinishedRollout) -> str:
    """The name of a rollout's group; one without is a group of its own."""
    return item.rollout.group_id or item.rollout.rollout_id


def _comparable(kept: list[_Kept], min_group: int, with_baselines: bool) -> list[_Kept]:
    sizes = Counter(item.group for item in kept)
    return [
        item
        for item in kept
        if sizes[item.group] >= min_group and not (with_baselines and item.baseline is None)
    ]


def _as_batch(trained: list[_Kept], limit: RowLimit, with_baselines: bool) -> TrainBatch:
    rows: list[Trajectory] = []
    owners: list[int] = []
    turns: list[TurnReward] = []
    for owner, item in enumerate(trained):
        place_of: dict[int | None, int] = {}
        for place, row in enumerate(item.trajectories.rows):
            if (within := limit.applied(row)) is not None:
                place_of[place] = len(rows)
                rows.append(within)
                owners.append(owner)
        turns += [TurnReward(turn.value, owner, place_of.get(turn.row), turn.token) for turn in item.turns]
    baselines = [item.baseline for item in trained if item.baseline is not None] if with_baselines else None
    return TrainBatch(
        [item.reward for item in trained], [item.group for item in trained], rows, owners, turns, baselines
    )


def _equal_groups(groups: list[str], rewards: list[float]) -> set[str]:
    """Groups of which all rewards are equal."""
    seen: dict[str, set[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        seen.setdefault(group, set()).add(reward)
    return {group for group, values in seen.items() if len(values) == 1}


def _tells_apart(trained: list[_Kept], same: set[str], baseline_kind: BaselineKind) -> bool:
    """Whether any rollout would be better or worse than what it is compared with."""
    if baseline_kind == "group":
        return any(item.group not in same for item in trained)
    if baseline_kind == "batch":
        return len({item.total for item in trained}) > 1
    if baseline_kind == "greedy":
        return any(item.total != item.baseline for item in trained)
    return bool(trained)


def _why_empty(empty: int, aborted: int, other_agents: int, trained_agents: str | None) -> str:
    if aborted:
        return (
            f"{empty} rollouts were scored, but all {aborted} calls that could be trained were cut off: agents, or what is between "
            "them and the engine, closed the connections; raise their timeouts, and look into the log of serving"
        )
    if other_agents:
        return (
            f"{empty} rollouts were scored, but all their {other_agents} calls are of agents that are not trained, or of agents "
            f"without a name: check trained_agents ({trained_agents!r}) and rollout.mark_agent_as_trainable, and name the agents "
            "that call (llm.for_agent, or spans with gen_ai.agent.name)"
        )
    return (
        f"{empty} rollouts were scored, but none called the model being trained: the agent must use llm.endpoint as base URL, "
        "llm.api_key as key and llm.model as model"
    )
