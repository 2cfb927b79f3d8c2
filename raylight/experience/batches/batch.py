"""Training batches: trajectories, rewards and groups of finished rollouts, for one update."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeVar

from raylight.errors import EmptyTraceError
from raylight.experience.batches.lengths import count_by_length
from raylight.experience.batches.token_budgets import LongRows, RowLimit
from raylight.experience.settings.advantages import BaselineKind, TurnGroups
from raylight.experience.trajectories.call_relations import RelationReport, report_relations
from raylight.experience.trajectories.off_policy import (
    OffPolicyCalls,
    OffPolicySampling,
    count_repeated_seeds,
    untrainable_parameters,
)
from raylight.experience.trajectories.reward_rules import (
    RewardRules,
    TurnReward,
    assign_turn_rewards,
    count_sampled,
    split_by_agent,
    split_by_model,
)
from raylight.experience.trajectories.row_rules import RowRules, is_masked
from raylight.experience.trajectories.scored_rollout import (
    ScoredRollout,
    differ,
    drop_without_baseline,
    has_signal,
    zero_variance_groups,
)
from raylight.experience.trajectories.staleness import StaleMask, TokenAges, describe_ages, oldest_version
from raylight.experience.trajectories.trajectory import TokenCounts, build_trajectories, select_rows
from raylight.experience.trajectories.turns import CreditedTurn, build_turns
from raylight.types import GREEDY, FinishedRollout, Generation, LogprobArray, TopLogprobs, Trajectory

Turn = TypeVar("Turn", TurnReward, CreditedTurn)


@dataclass(frozen=True)
class TrainBatch:
    """Rollouts with their rewards and trajectories. With credit per agent, a rollout here is the part of one
    agent.

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
    """Named rewards of each rollout, for an estimator that normalises them separately (GDPO)."""
    weights: list[float] | None = None
    """Factor of the advantages of each rollout; None for 1."""
    lengths: list[int] | None = None
    """Sampled tokens of each rollout, trained or not; None: those of its rows."""
    teacher_logprobs: list[LogprobArray] | None = None
    """The teacher's log-probs of each row's tokens after its prompt (OPD)."""
    turns: list[CreditedTurn] = field(default_factory=list)
    """Turns of the rollouts, for an estimator that credits them (GiGPO); else empty."""
    teacher_numbers: list[int] | None = None
    """Number of each row's teacher, of several on the learners' ranks (OPD)."""
    teacher_tops: list[TopLogprobs] | None = None
    """The teacher's most probable tokens in the place of each row's tokens after its prompt (OPD)."""
    models: list[str] | None = None
    """Model of each rollout, in a run with several models."""
    signals: frozenset[str] = frozenset()
    """Models whose part of the batch can change them."""
    image_files: Mapping[str, bytes] = field(default_factory=dict)
    """Files of the rows' images by digest."""

    @property
    def image_digests(self) -> list[str]:
        """Digests of the rows' images, each once."""
        return sorted({image.sha256 for row in self.rows for image in row.images})

    def parts_of_models(self) -> dict[str, ModelPart]:
        """Return the part of each model that has rows and a signal."""
        assert self.models is not None, "the run has several models"
        return {
            name: self._part(name, self.models) for name in dict.fromkeys(self.models) if name in self.signals
        }

    def _part(self, name: str, models: list[str]) -> ModelPart:
        own = [index for index, model in enumerate(models) if model == name]
        place = {index: new for new, index in enumerate(own)}
        rows = [row for row, owner in enumerate(self.owners) if owner in place]
        new_row: dict[int | None, int] = {row: new for new, row in enumerate(rows)}

        def move(turns: list[Turn]) -> list[Turn]:
            return [
                replace(turn, rollout=place[turn.rollout], row=new_row.get(turn.row))
                for turn in turns
                if turn.rollout in place
            ]

        batch = TrainBatch(
            [self.rewards[i] for i in own],
            [self.groups[i] for i in own],
            [self.rows[row] for row in rows],
            [place[self.owners[row]] for row in rows],
            move(self.turn_rewards),
            turns=move(self.turns),
            parts=None if self.parts is None else [self.parts[i] for i in own],
            weights=None if self.weights is None else [self.weights[i] for i in own],
            lengths=None if self.lengths is None else [self.lengths[i] for i in own],
            image_files=self.image_files,
        )
        return ModelPart(batch, rows)


class ModelPart(NamedTuple):
    """The part of a batch that one model is trained on."""

    batch: TrainBatch
    rows: list[int]
    """Index in the whole batch of each of its rows."""


DEFAULT_REWARDS = RewardRules()


@dataclass(frozen=True)
class BatchRules(RowRules):
    """Declaration of an algorithm: the rules that turn finished rollouts into a batch.

    Args:
        rewards: rules of the rewards.
        min_group: smallest group; a group with fewer remaining rollouts is left out.
        zero_variance_groups: treatment of groups whose rewards are all equal.
        row_limit: tokens of the longest row; None for no limit.
        long_rows: treatment of longer rows.
        baseline_kind: baseline of the advantage estimator.
        off_policy_sampling: treatment of calls that were not sampled from the policy's own distribution.
        by_agent: divide rollouts by agent, so that each has its own reward, baseline and advantage.
        agent_weights: factors of the advantages of agents, by name; 1 for others.
        stale: mask of tokens that old weights sampled; None if all have the learners' version.
        turn_groups: turns that an estimator compares; None for one that does not credit turns.
    """

    rewards: RewardRules = DEFAULT_REWARDS
    min_group: int = 1
    zero_variance_groups: Literal["keep", "drop"] = "keep"
    row_limit: int | None = None
    long_rows: LongRows = "error"
    baseline_kind: BaselineKind = "group"
    off_policy_sampling: OffPolicySampling = "error"
    by_agent: bool = False
    agent_weights: Mapping[str, float] = field(default_factory=dict)
    stale: StaleMask | None = None
    turn_groups: TurnGroups | None = None

    def is_informative(self, group: list[FinishedRollout]) -> bool:
        """Return True if the rewards of a group's rollouts that called the model, or of one of its agents,
        differ, see `differ`."""
        compared: defaultdict[str, list[tuple[float, ...]]] = defaultdict(list)
        for part in (part for item in group for part in self.split(item)):
            if part.generations and (signal := self.rewards.signal(part)) is not None:
                compared[part.group].append(self.rewards.compared(part, part.generations, signal))
        return any(differ(values, self.baseline_kind) for values in compared.values())

    def split(self, item: FinishedRollout) -> list[FinishedRollout]:
        """Divide a rollout by its agents and trained models; one without a reward or a trained call stays
        whole."""
        if self.rewards.final_reward(item) is None:
            return [item]
        # agents first: only the whole rollout shows which call came before a turn reward
        calls = [call for calls in self.split_calls(item) for call in calls] if self.by_agent else []
        parts = split_by_agent(item, calls) if calls else [item]
        if self.models:
            parts = [part for whole in parts for part in split_by_model(whole, self.models)]
        return parts or [item]

    def without_other_models(self, item: FinishedRollout) -> FinishedRollout:
        """Return a rollout without the calls of models that are not trained."""
        if all(call.model in self.models for call in item.generations):
            return item
        return replace(item, generations=[call for call in item.generations if call.model in self.models])

    def oldest_version(self, group: list[FinishedRollout]) -> int | None:
        """Return the oldest version that sampled a token that a group would be trained on; None for no
        token."""
        return oldest_version(
            call
            for item in group
            if not item.rollout.metadata.get(GREEDY) and self.rewards.reward(item) is not None
            for call in self.split_calls(item)[0]
            if call.finish_reason != "aborted" and not untrainable_parameters(call, self.replays_sampling)
        )


@dataclass(frozen=True)
class BatchReport:
    """Counts of the rollouts of a batch, or of its groups, calls and rows if so named. With credit per agent,
    the part of one agent counts as a rollout."""

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
    other_models: int = 0
    """Calls of models of the run that are not trained."""
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
    stale_by_length: Counter[int] = field(default_factory=Counter)
    """Tokens that are masked because they are too old, by the class of their rollout's length."""
    trained_by_length: Counter[int] = field(default_factory=Counter)
    """Tokens of the batch's rows that are in the loss, by the class of their rollout's length. In a run with
    several models, rows of a model without signal are not."""
    excluded_tokens: int = 0
    """Tokens of rollouts that failed, have no reward, no call of a trained agent, or no baseline."""
    models: tuple[str, ...] = ()
    """Names of the trained models in a run with several."""
    trained_by_model: Counter[str] = field(default_factory=Counter)
    """Tokens in the loss of each of these models."""
    ages: TokenAges | None = None
    """Ages of the tokens; None if all have the learners' version."""
    off_policy_calls: int = 0
    """Calls whose tokens are masked because they were not sampled from the policy's own distribution, in all
    scored rollouts."""
    off_policy: str | None = None
    """The most frequent agent, model and sampling parameters of such calls."""
    repeated_seeds: int = 0
    """Rollouts with a seed in their calls that another rollout of their group has too."""
    agent_rewards: dict[str, float] = field(default_factory=dict)
    """Mean reward of each agent; empty without credit per agent."""
    tokens: TokenCounts = field(default_factory=TokenCounts)
    """Tokens of trained calls."""
    relations: RelationReport = field(default_factory=RelationReport)
    """Rows per rollout, and relations of calls to earlier ones."""

    @property
    def trained_tokens(self) -> int:
        """Tokens of the batch's rows that are in the loss."""
        return self.trained_by_length.total()

    @property
    def stale_tokens(self) -> int:
        """Tokens that are masked because they are too old."""
        return self.stale_by_length.total()


def build_batch(finished: list[FinishedRollout], rules: BatchRules) -> tuple[TrainBatch, BatchReport]:
    """Build a batch from finished rollouts.

    A failed rollout is left out, unless the rules give it a reward and it has generations. Infrastructure
    failures are always left out. Groups with fewer than `min_group` remaining rollouts are left out too: an
    estimator with a group baseline would use the reward of a single rollout as its advantage.

    Raises:
        EmptyTraceError: rollouts were scored, but none has a completed call of a trained agent to the model
            being trained.
        RowTooLongError: a row is longer than the limit, and `long_rows` is "error".
        GreedyError: a rollout that should be greedy was sampled otherwise.
        OffPolicySamplingError: a call of a trained agent was not sampled from the policy's own distribution,
            and `off_policy_sampling` is "error".
    """
    needs_baseline = rules.baseline_kind == "greedy"
    lengths = {item.rollout.rollout_id: count_sampled(item.generations) for item in finished}
    counts: Counter[str] = Counter()
    if rules.models:
        calls = sum(len(item.generations) for item in finished)
        finished = [rules.without_other_models(item) for item in finished]
        counts["other_models"] = calls - sum(len(item.generations) for item in finished)
    parts = [rules.split(item) for item in finished]
    counts["other_agents"] = sum(
        len(item.generations) - sum(len(part.generations) for part in split)
        for item, split in zip(finished, parts, strict=True)
    )
    finished = [part for split in parts for part in split]  # with credit per agent, each part is scored
    baselines = {}
    if needs_baseline:
        baselines = rules.rewards.greedy_baselines(finished, lambda item: rules.split_calls(item)[0])
    scorer = _Scorer(rules, baselines, lengths, counts)
    sampled = [item for item in finished if not (needs_baseline and item.rollout.metadata.get(GREEDY))]
    scored = [found for item in sampled if (found := scorer.score(item)) is not None]
    if not scored and counts["empty"]:
        raise EmptyTraceError(_empty_reason(counts, rules.trained_agents))
    comparable = drop_without_baseline(scored, rules.min_group, needs_baseline)
    counts["excluded_tokens"] += sum(x.tokens for x in scored) - sum(x.tokens for x in comparable)
    constant = zero_variance_groups(comparable, rules.baseline_kind)
    trained = comparable
    if rules.zero_variance_groups == "drop":
        trained = [item for item in comparable if item.group not in constant]
    limit = RowLimit(rules.row_limit, rules.long_rows)
    batch, rows_empty = _assemble(trained, limit, needs_baseline)
    signals = _signals(trained, batch, constant, rules.baseline_kind)
    if rules.models:
        batch = replace(batch, models=[item.model for item in trained], signals=frozenset(signals))
    sampled_rows = [row for item in trained for row in item.sampled_rows]
    unselected_rows = [row for item in trained for row in item.unselected_rows]
    rows_forced = sum(not row.trained_tokens for row in sampled_rows)
    report = BatchReport(
        trained=len(trained),
        without_baseline=len(scored) - len(comparable),
        groups=len({item.group for item in comparable}),
        groups_without_signal=len(constant),
        has_signal=bool(signals),
        zero_variance=len(comparable) - len(trained),
        auxiliary_tokens=sum(item.auxiliary_tokens for item in comparable),
        rows_dropped=limit.dropped,
        rows_truncated=limit.truncated,
        rows_forced=rows_forced,
        rows_unselected=len(unselected_rows),
        unselected_tokens=_count_trained(unselected_rows),
        rows_stale=rows_empty - rows_forced,
        stale_by_length=count_by_length(
            (lengths[item.rollout_id], _count_trained(item.sampled_rows) - _count_trained(item.rows))
            for item in trained
        ),
        trained_by_length=count_by_length(
            (lengths[trained[owner].rollout_id], row.trained_tokens)
            for owner, row in zip(batch.owners, batch.rows, strict=True)
            if batch.models is None or trained[owner].model in signals
        ),
        models=rules.models,
        trained_by_model=_trained_by_model(batch),
        ages=describe_ages(rules.stale.version, batch.rows, sampled_rows) if rules.stale else None,
        repeated_seeds=count_repeated_seeds(scorer.calls),
        off_policy_calls=scorer.off_policy.calls,
        off_policy=next((text for text, _ in scorer.off_policy.parameters.most_common(1)), None),
        tokens=sum((item.trajectories.tokens for item in trained), TokenCounts()),
        relations=report_relations(item.trajectories for item in trained),
        agent_rewards=_mean_rewards(scored),
        **{name: counts[name] for name in COUNTED},
    )
    return batch, report


COUNTED = (
    *("failed", "unscored", "empty", "other_agents", "other_models", "auxiliary_calls", "aborted"),
    "excluded_tokens",
)
"""Counts of a report that are known once the rollouts are scored."""


class _Scorer:
    """Scores the rollouts of a step one by one, and counts what it leaves out."""

    def __init__(
        self, rules: BatchRules, baselines: dict[str, float], lengths: dict[str, int], counts: Counter[str]
    ) -> None:
        self._rules, self._baselines, self._lengths, self._counts = rules, baselines, lengths, counts
        self.off_policy = OffPolicyCalls(rules.off_policy_sampling, rules.replays_sampling)
        self.calls: defaultdict[str, list[list[Generation]]] = defaultdict(list)
        """Trained calls of the scored rollouts, by group."""

    def score(self, item: FinishedRollout) -> ScoredRollout | None:
        """Return a rollout that may be trained; None leaves it out."""
        rules, counts = self._rules, self._counts
        tokens, signal = count_sampled(item.generations), rules.rewards.signal(item)
        if signal is None:
            counts["unscored" if item.rollout.status == "succeeded" else "failed"] += 1
            counts["excluded_tokens"] += tokens
            return None
        reward = signal - rules.rewards.penalty(self._lengths[item.rollout.rollout_id])
        generations, others = rules.split_calls(item)
        counts["other_agents"] += len(item.generations) - len(generations) - len(others)
        counts["auxiliary_calls"] += len(others)
        counts["aborted"] += sum(call.finish_reason == "aborted" for call in generations)
        masked = self.off_policy.judge(call for call in generations if call.finish_reason != "aborted")
        sampled = build_trajectories(generations, masked)
        if not sampled.rows:
            counts["empty"] += 1
            counts["excluded_tokens"] += tokens
            return None
        group = item.group
        self.calls[group].append(generations)
        trajectories = sampled if rules.stale is None else rules.stale.apply(sampled)
        turns = assign_turn_rewards(item, trajectories) if rules.rewards.turn_rewards else []
        calls = []
        if rules.turn_groups is not None:
            calls = build_turns(item, sampled, rules.rewards, reward, rules.turn_groups)
        compared = rules.rewards.compared(item, sampled.calls, signal)
        if is_masked(item):
            sampled = trajectories = replace(sampled, rows=[])
        agent = generations[0].agent if rules.by_agent else None
        return ScoredRollout(
            rollout_id=item.rollout.rollout_id,
            group=group,
            reward=reward,
            parts=rules.rewards.parts(item),
            compared=compared,
            sampled=sampled,
            trajectories=trajectories,
            turns=turns,
            baseline=self._baselines.get(group),
            tokens=tokens,
            auxiliary_tokens=count_sampled(others),
            selected=select_rows(sampled.rows, rules.trajectory_selection),
            signal=signal,
            calls=calls,
            agent=agent,
            weight=rules.agent_weights.get(agent or "", 1.0),
            model=generations[0].model if rules.models else "",
        )


def _signals(
    trained: list[ScoredRollout], batch: TrainBatch, constant: set[str], kind: BaselineKind
) -> set[str]:
    """Return the models that the batch can change; the name of the only model of a run is empty."""
    by_model: defaultdict[str, list[int]] = defaultdict(list)
    for index, item in enumerate(trained):
        by_model[item.model].append(index)
    with_rows = set(batch.owners)
    return {
        name
        for name, own in by_model.items()
        if has_signal(
            [trained[i] for i in own], {n for n, i in enumerate(own) if i in with_rows}, constant, kind
        )
    }


def _trained_by_model(batch: TrainBatch) -> Counter[str]:
    counts: Counter[str] = Counter()
    if batch.models is not None:
        for row, owner in zip(batch.rows, batch.owners, strict=True):
            if (name := batch.models[owner]) in batch.signals:
                counts[name] += row.trained_tokens
    return counts


def _mean_rewards(scored: list[ScoredRollout]) -> dict[str, float]:
    rewards: defaultdict[str, list[float]] = defaultdict(list)
    for item in scored:
        if item.agent is not None:
            rewards[item.agent].append(item.signal)
    return {agent: statistics.fmean(values) for agent, values in rewards.items()}


def _count_trained(rows: list[Trajectory]) -> int:
    return sum(row.trained_tokens for row in rows)


def _assemble(trained: list[ScoredRollout], limit: RowLimit, with_baselines: bool) -> tuple[TrainBatch, int]:
    """Return the batch, and the number of rows that were left out because no token of them is trained."""
    empty = 0
    rows: list[Trajectory] = []
    owners: list[int] = []
    rewards: list[TurnReward] = []
    turns: list[CreditedTurn] = []
    for owner, item in enumerate(trained):
        batch_row: dict[int | None, int] = {}  # row of the rollout -> row of the batch
        for index, row in zip(item.selected, item.rows, strict=True):
            if not row.trained_tokens:
                empty += 1
            elif (limited := limit.apply(row)) is not None:
                batch_row[index] = len(rows)
                rows.append(limited)
                owners.append(owner)
        rewards += [replace(turn, rollout=owner, row=batch_row.get(turn.row)) for turn in item.turns]
        turns += [replace(turn, rollout=owner, row=batch_row.get(turn.row)) for turn in item.calls]
    baselines = [item.baseline for item in trained if item.baseline is not None] if with_baselines else None
    parts = [item.parts for item in trained if item.parts is not None]
    batch = TrainBatch(
        [item.reward for item in trained],
        [item.group for item in trained],
        rows,
        owners,
        rewards,
        baselines,
        parts or None,
        [item.weight for item in trained] if any(item.weight != 1.0 for item in trained) else None,
        [item.sampled.tokens.sampled for item in trained],
        turns=turns,
    )
    return batch, empty


def _empty_reason(counts: Counter[str], trained_agents: str | None) -> str:
    empty, aborted, other_agents = counts["empty"], counts["aborted"], counts["other_agents"]
    auxiliary = counts["auxiliary_calls"]
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
