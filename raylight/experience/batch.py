"""Training batches: trajectories, rewards and groups of finished rollouts, for one update."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from raylight.errors import EmptyTraceError
from raylight.experience.call_relations import RelationReport, report_relations
from raylight.experience.off_policy import OffPolicyCalls, OffPolicySampling, count_repeated_seeds
from raylight.experience.registry import BaselineKind
from raylight.experience.rewards import TurnReward, assign_turn_rewards, effective_reward, group_key
from raylight.experience.row_rules import RowRules, is_masked
from raylight.experience.scored_rollout import (
    ScoredRollout,
    drop_without_baseline,
    has_signal,
    zero_variance_groups,
)
from raylight.experience.staleness import StaleMask, TokenAges, describe_ages
from raylight.experience.token_budgets import LongRows, RowLimit
from raylight.experience.trajectory import TokenCounts, build_trajectories, select_rows
from raylight.types import FinishedRollout, Generation, LogprobArray, Trajectory


@dataclass(frozen=True)
class TrainBatch:
    """Rollouts with their rewards and trajectories.

    `rewards`, `groups` and `baselines` have one entry per rollout. `rows` are trajectories, and `owners[i]`
    is the index of the rollout that row i belongs to. A rollout may own several rows, or none if they were
    too long or had only forced tokens. Its advantage is computed once and shared by its rows.
    """

    rewards: list[float]
    groups: list[str]
    rows: list[Trajectory]
    owners: list[int]
    turn_rewards: list[TurnReward] = field(default_factory=list)
    """Rewards in addition to the final ones, which are in `rewards`."""
    baselines: list[float] | None = None
    """Baseline reward of each rollout, for estimators that do not derive it from the batch (ReMax)."""
    parts: list[tuple[float, ...]] | None = None
    """Named rewards of each rollout, for an estimator that normalises them apart (GDPO)."""
    teacher_logprobs: list[LogprobArray] | None = None
    """The teacher's log-probs of each row's tokens after its prompt (OPD)."""


@dataclass(frozen=True)
class BatchRules(RowRules):
    """Rules that turn finished rollouts into a batch, beside those that choose their rows.

    Args:
        failure_reward: reward of rollouts whose agent failed; None leaves them out.
        min_group: smallest group; a group with fewer remaining rollouts is left out.
        zero_variance_groups: treatment of groups whose rewards are all equal.
        row_limit: tokens of the longest row; None for no limit.
        long_rows: treatment of longer rows.
        turn_rewards: train on rewards emitted before the final one too.
        baseline_kind: baseline of the advantage estimator.
        off_policy_sampling: treatment of calls that were not sampled from the policy's own distribution.
        stale: mask of tokens that old weights sampled; None if all have the learners' version.
    """

    failure_reward: float | None = None
    min_group: int = 1
    zero_variance_groups: Literal["keep", "drop"] = "keep"
    row_limit: int | None = None
    long_rows: LongRows = "error"
    turn_rewards: bool = False
    baseline_kind: BaselineKind = "group"
    off_policy_sampling: OffPolicySampling = "error"
    stale: StaleMask | None = None


@dataclass(frozen=True)
class BatchReport:
    """Counts of the rollouts of a batch, or of its groups, calls and rows if so named."""

    trained: int
    failed: int
    unscored: int
    """Rollouts that succeeded without a reward."""
    empty: int
    """Rollouts without a call to the model being trained."""
    without_baseline: int
    """Rollouts left out because their group is too small or has no baseline."""
    groups: int
    groups_without_signal: int
    """Groups in which all rewards are equal, so that no rollout is better than another."""
    has_signal: bool
    """True if the batch can change the policy: it has rows, and a reward that differs from its baseline."""
    zero_variance: int = 0
    """Rollouts left out because all rewards of their group are equal."""
    other_agents: int = 0
    """Calls of agents that are not trained, in all scored rollouts."""
    auxiliary_calls: int = 0
    """Calls of trained agents that asked for another model name and are not trained, in all scored
    rollouts."""
    auxiliary_tokens: int = 0
    """Tokens of such calls in rollouts that were not excluded."""
    aborted: int = 0
    """Calls of trained agents whose response was cut off, in all scored rollouts. They are not trained."""
    rows_dropped: int = 0
    """Rows left out because they are longer than the limit."""
    rows_truncated: int = 0
    """Rows truncated at the limit."""
    rows_forced: int = 0
    """Rows left out because all their tokens were forced by a constraint, or sampled off-policy."""
    rows_unselected: int = 0
    """Rows left out because they are not the longest of their rollout."""
    unselected_tokens: int = 0
    """Tokens of these rows that could be trained."""
    rows_stale: int = 0
    """Rows left out because all tokens that could be trained are too old."""
    stale_tokens: int = 0
    """Tokens that are masked because they are too old."""
    trained_tokens: int = 0
    """Tokens of the batch's rows that are in the loss."""
    excluded_tokens: int = 0
    """Tokens of rollouts that failed, have no reward, no call of a trained agent, or no baseline."""
    ages: TokenAges | None = None
    """Ages of the tokens; None if all have the learners' version."""
    off_policy_calls: int = 0
    """Calls whose tokens are masked because they were not sampled from the policy's own distribution, in all
    scored rollouts."""
    off_policy: str | None = None
    """The most frequent agent, model and sampling parameters of such calls."""
    repeated_seeds: int = 0
    """Rollouts with a seed in their calls that another rollout of their group has too."""
    tokens: TokenCounts = field(default_factory=TokenCounts)
    """Tokens of trained calls."""
    relations: RelationReport = field(default_factory=RelationReport)
    """Rows per rollout, and relations of calls to earlier ones."""


def build_batch(
    finished: list[FinishedRollout],
    rules: BatchRules,
    reward_of: Callable[[FinishedRollout], float | None] | None = None,
    baselines: dict[str, float] | None = None,
    parts_of: Callable[[FinishedRollout], tuple[float, ...] | None] = lambda item: None,
    signal_of: Callable[[FinishedRollout], float | None] | None = None,
) -> tuple[TrainBatch, BatchReport]:
    """Build a batch from finished rollouts.

    A failed rollout is left out, unless `failure_reward` gives it a reward and it has generations.
    Infrastructure failures are always left out. Groups with fewer than `min_group` remaining rollouts are
    left out too: an estimator with a group baseline would use the reward of a single rollout as its
    advantage.

    Args:
        reward_of: function from a rollout to its reward, or None for no reward; default: `effective_reward`.
        baselines: baseline by group. A group without one is left out. None if the estimator needs no
            baselines.
        parts_of: function from a rollout to its named rewards that are normalised apart; None for all
            rollouts if only the reward counts.
        signal_of: function from a rollout to the reward by which groups are compared; default: `reward_of`.

    Raises:
        EmptyTraceError: rollouts were scored, but none has a completed call of a trained agent to the model
            being trained.
        RowTooLongError: a row is longer than the limit, and `long_rows` is "error".
        OffPolicySamplingError: a call of a trained agent was not sampled from the policy's own distribution,
            and `off_policy_sampling` is "error".
    """
    scored: list[ScoredRollout] = []
    off_policy = OffPolicyCalls(rules.off_policy_sampling)
    calls: defaultdict[str, list[list[Generation]]] = defaultdict(list)
    failed = unscored = empty = other_agents = aborted = excluded = auxiliary = 0
    for item in finished:
        tokens = _count_sampled(item.generations)
        reward = reward_of(item) if reward_of else effective_reward(item, rules.failure_reward)
        if reward is None:
            failed += item.rollout.status != "succeeded"
            unscored += item.rollout.status == "succeeded"
            excluded += tokens
            continue
        generations, others = rules.split_calls(item)
        other_agents += len(item.generations) - len(generations) - len(others)
        auxiliary += len(others)
        aborted += sum(call.finish_reason == "aborted" for call in generations)
        masked = off_policy.judge(call for call in generations if call.finish_reason != "aborted")
        sampled = build_trajectories(generations, masked)
        if not sampled.rows:
            empty += 1
            excluded += tokens
            continue
        group = group_key(item)
        calls[group].append(generations)
        trajectories = sampled if rules.stale is None else rules.stale.apply(sampled)
        turns = assign_turn_rewards(item, trajectories.chosen_positions) if rules.turn_rewards else []
        baseline = (baselines or {}).get(group)
        if is_masked(item):
            sampled = trajectories = replace(sampled, rows=[])
        selected = select_rows(sampled.rows, rules.trajectory_selection)
        untrained = _count_sampled(others)
        scored.append(
            ScoredRollout(
                group,
                reward,
                parts_of(item),
                sampled,
                trajectories,
                turns,
                baseline,
                tokens,
                untrained,
                selected,
                reward if signal_of is None or (signal := signal_of(item)) is None else signal,
            )
        )
    if not scored and empty:
        reason = _empty_reason(empty, aborted, other_agents, auxiliary, rules.trained_agents)
        raise EmptyTraceError(reason)
    comparable = drop_without_baseline(scored, rules.min_group, baselines is not None)
    excluded += sum(item.tokens for item in scored) - sum(item.tokens for item in comparable)
    constant = zero_variance_groups(comparable)
    trained = comparable
    if rules.zero_variance_groups == "drop":
        trained = [item for item in comparable if item.group not in constant]
    limit = RowLimit(rules.row_limit, rules.long_rows)
    batch, rows_empty = _assemble(trained, limit, baselines is not None)
    sampled_rows = [row for item in trained for row in item.sampled_rows]
    kept_rows = [row for item in trained for row in item.rows]
    unselected_rows = [row for item in trained for row in item.unselected_rows]
    rows_forced = sum(not row.trained_tokens for row in sampled_rows)
    report = BatchReport(
        trained=len(trained),
        failed=failed,
        unscored=unscored,
        empty=empty,
        without_baseline=len(scored) - len(comparable),
        groups=len({item.group for item in comparable}),
        groups_without_signal=len(constant),
        has_signal=has_signal(trained, set(batch.owners), constant, rules.baseline_kind),
        zero_variance=len(comparable) - len(trained),
        other_agents=other_agents,
        auxiliary_calls=auxiliary,
        auxiliary_tokens=sum(item.auxiliary_tokens for item in comparable),
        aborted=aborted,
        rows_dropped=limit.dropped,
        rows_truncated=limit.truncated,
        rows_forced=rows_forced,
        rows_unselected=len(unselected_rows),
        unselected_tokens=_count_trained(unselected_rows),
        rows_stale=rows_empty - rows_forced,
        stale_tokens=_count_trained(sampled_rows) - _count_trained(kept_rows),
        trained_tokens=_count_trained(batch.rows),
        excluded_tokens=excluded,
        ages=describe_ages(rules.stale.version, batch.rows, sampled_rows) if rules.stale else None,
        repeated_seeds=count_repeated_seeds(calls),
        off_policy_calls=off_policy.calls,
        off_policy=next((text for text, _ in off_policy.parameters.most_common(1)), None),
        tokens=sum((item.trajectories.tokens for item in trained), TokenCounts()),
        relations=report_relations(item.trajectories for item in trained),
    )
    return batch, report


def _count_sampled(generations: list[Generation]) -> int:
    return sum(len(call.output_ids) for call in generations)


def _count_trained(rows: list[Trajectory]) -> int:
    return sum(row.trained_tokens for row in rows)


def _assemble(trained: list[ScoredRollout], limit: RowLimit, with_baselines: bool) -> tuple[TrainBatch, int]:
    """Return the batch, and the number of rows that were left out because no token of them is trained."""
    empty = 0
    rows: list[Trajectory] = []
    owners: list[int] = []
    turns: list[TurnReward] = []
    for owner, item in enumerate(trained):
        batch_row: dict[int | None, int] = {}  # row of the rollout -> row of the batch
        for index, row in zip(item.selected, item.rows, strict=True):
            if not row.trained_tokens:
                empty += 1
            elif (limited := limit.apply(row)) is not None:
                batch_row[index] = len(rows)
                rows.append(limited)
                owners.append(owner)
        turns += [TurnReward(turn.value, owner, batch_row.get(turn.row), turn.token) for turn in item.turns]
    baselines = [item.baseline for item in trained if item.baseline is not None] if with_baselines else None
    parts = [item.parts for item in trained if item.parts is not None]
    batch = TrainBatch(
        [item.reward for item in trained],
        [item.group for item in trained],
        rows,
        owners,
        turns,
        baselines,
        parts or None,
    )
    return batch, empty


def _empty_reason(
    empty: int, aborted: int, other_agents: int, auxiliary: int, trained_agents: str | None
) -> str:
    if aborted:
        return (
            f"{empty} rollouts were scored, but all {aborted} calls that could be trained were cut off: the "
            "agents, or a proxy between them and the engine, closed the connections; raise their timeouts, "
            "and check the log of serving"
        )
    if auxiliary:
        return (
            f"{empty} rollouts were scored, but all {auxiliary} calls that could be trained asked for "
            "another model than llm.model, which marks them as auxiliary: have the agent send llm.model, or "
            "set train_auxiliary_calls=True"
        )
    if other_agents:
        return (
            f"{empty} rollouts were scored, but all their {other_agents} calls are of agents that are not "
            f"trained, or of agents without a name: check trained_agents ({trained_agents!r}) and "
            "rollout.mark_agent_as_trainable, and name the agents that call (llm.for_agent, or spans with "
            "gen_ai.agent.name)"
        )
    return (
        f"{empty} rollouts were scored, but none called the model being trained: the agent must use "
        "llm.endpoint as base URL, llm.api_key as key and llm.model as model"
    )
