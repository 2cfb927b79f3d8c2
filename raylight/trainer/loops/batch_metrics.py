"""Metrics of a batch of rollouts, and the error for a batch that cannot be trained on."""

from __future__ import annotations

import statistics
from collections import Counter
from typing import get_args

from raylight.engines.capture_context import OVERRIDDEN
from raylight.errors import EmptyTraceError, RewardError, RolloutsFailedError
from raylight.experience.batches.batch import BatchReport
from raylight.experience.opponents import model_of_call
from raylight.experience.trajectories.call_relations import COUNTED
from raylight.experience.trajectories.reward_rules import effective_reward
from raylight.trainer.output.report import Metrics
from raylight.types import GREEDY, SOURCE, Budget, FinishedRollout
from raylight.types.rollouts import FailureKind


def describe(
    finished: list[FinishedRollout], content: BatchReport, seconds: float, failure_reward: float | None = None
) -> Metrics:
    """Return the metrics of a training batch. Greedy rollouts, the baseline of ReMax, count in tokens per
    second only.

    Args:
        content: counts of the batch that was built from the rollouts.
        seconds: duration of the rollouts.
        failure_reward: reward of a rollout whose agent failed; None leaves it out of the mean.
    """
    sampled = [item for item in finished if not item.rollout.metadata.get(GREEDY)]
    rewards = [reward for item in sampled if (reward := effective_reward(item, failure_reward)) is not None]
    lengths = [len(call.output_ids) for item in sampled for call in item.generations]
    reasons = [call.finish_reason for item in sampled for call in item.generations]
    tokens = sum(len(call.output_ids) for item in finished for call in item.generations)
    metrics = {
        "train/rollouts": float(len(sampled)),
        "train/trained": float(content.trained),
        "train/failed": float(sum(item.rollout.status != "succeeded" for item in sampled)),
        **_failure_metrics(sampled),
        "train/unscored": float(content.unscored),
        **_reward_metrics(sampled, failure_reward),
        "train/empty": float(content.empty),
        "train/alone": float(content.without_baseline),
        "train/groups": float(content.groups),
        "train/groups_without_signal": float(content.groups_without_signal),
        "train/equal": float(content.zero_variance),
        "train/aborted": float(content.aborted),
        "train/other_agents": float(content.other_agents),
        "train/auxiliary_calls": float(content.auxiliary_calls),
        **_model_metrics(sampled, content),
        "trace/rows_unselected": float(content.rows_unselected),
        "trace/rows_dropped": float(content.rows_dropped),
        "trace/rows_truncated": float(content.rows_truncated),
        "trace/rows_per_rollout": content.relations.rows_per_rollout,
        "trace/rows_per_rollout_max": float(content.relations.max_rows),
        "trace/spans_dropped": float(sum(_spans_dropped(item) for item in sampled)),
        "trace/calls": float(content.relations.calls),
        **{f"trace/{name}": float(content.relations.counts[name]) for name in COUNTED},
        **{f"agent/{name}/reward": reward for name, reward in content.agent_rewards.items()},
        **_constraint_metrics(content),
        **_age_metrics(content),
        "off_policy/overridden_calls": float(
            sum(OVERRIDDEN in call.sampling for item in sampled for call in item.generations)
        ),
        "off_policy/repeated_seeds": float(content.repeated_seeds),
        "off_policy/calls": float(content.off_policy_calls),
        "off_policy/replayed_tokens": float(content.tokens.replayed),
        "off_policy/tokens": float(content.tokens.off_policy),
        "off_policy/fraction": content.tokens.off_policy / max(content.tokens.sampled, 1),
        "time/rollout_s": seconds,
        "train/tokens_per_s": tokens / seconds,
    }
    if any(item.rollout.config.has_budgets for item in sampled):
        metrics |= _truncation_metrics(sampled)
    if rewards:
        metrics |= {
            "train/reward": statistics.fmean(rewards),
            "train/reward_std": statistics.pstdev(rewards),
            "train/reward_min": min(rewards),
            "train/reward_max": max(rewards),
        }
    if lengths:
        metrics |= {
            "train/response_tokens": statistics.fmean(lengths),
            "train/calls": len(lengths) / len(sampled),
            "train/truncated_answers": statistics.fmean(reason == "length" for reason in reasons),
        }
    return metrics


def by_source(finished: list[FinishedRollout], failure_reward: float | None) -> dict[str, list[float]]:
    """Return the rewards of scored rollouts by the source of their task, if tasks have sources."""
    found: dict[str, list[float]] = {}
    for item in finished:
        source, reward = item.rollout.metadata.get(SOURCE), effective_reward(item, failure_reward)
        if source is not None and reward is not None:
            found.setdefault(source, []).append(reward)
    return found


def _reward_metrics(sampled: list[FinishedRollout], failure_reward: float | None) -> Metrics:
    """Return the means of named rewards after the first, the means by source, and the number of failed grades
    with a group reward."""
    named: dict[str, list[float]] = {}
    for item in sampled:
        if item.rollout.status == "succeeded":
            for name, value in list(item.rewards.items())[1:]:
                named.setdefault(name, []).append(value)
    metrics = {f"train/reward/{name}": statistics.fmean(values) for name, values in named.items()}
    for source, values in by_source(sampled, failure_reward).items():
        metrics[f"source/{source}/reward"] = statistics.fmean(values)
        metrics[f"source/{source}/rollouts"] = float(len(values))
    if any(item.graded for item in sampled):
        metrics["train/grades_failed"] = float(sum(item.grade_error is not None for item in sampled))
    return metrics


def _model_metrics(sampled: list[FinishedRollout], content: BatchReport) -> Metrics:
    """Return the number of calls of each model in a run with several."""
    if not content.models:
        return {}
    calls = Counter(model_of_call(call.model) for item in sampled for call in item.generations)
    counts = {name: float(calls[name]) for name in sorted(calls.keys() | set(content.models))}
    return {f"model/{name}/calls": count for name, count in counts.items()} | {
        "train/other_models": float(content.other_models)
    }


def _failure_metrics(sampled: list[FinishedRollout]) -> Metrics:
    """Return the number of failed rollouts by kind."""
    kinds = Counter(item.rollout.failure.kind for item in sampled if item.rollout.failure)
    return {f"failures/{kind}": float(kinds[kind]) for kind in get_args(FailureKind)}


def _spans_dropped(item: FinishedRollout) -> int:
    """Return the number of spans of a rollout that were not kept, such as those over its capacity."""
    metadata = (item.rollout.attempt.metadata if item.rollout.attempt else None) or {}
    count = metadata.get("spans_dropped", 0)
    return count if isinstance(count, int) else 0


def _truncation_metrics(sampled: list[FinishedRollout]) -> Metrics:
    """Return the numbers of rollouts that a budget truncated, in all and by budget."""
    spent = Counter(item.rollout.attempt.truncated for item in sampled if item.rollout.attempt)
    by_budget = {f"train/truncated_{budget}": float(spent[budget]) for budget in get_args(Budget)}
    return {"train/truncated": sum(by_budget.values()), **by_budget}


def _constraint_metrics(content: BatchReport) -> Metrics:
    """Return the metrics of tokens that were sampled under a constraint, such as a JSON schema."""
    tokens = content.tokens
    sampled = max(tokens.sampled, 1)
    metrics = {
        "constrained/tokens": float(tokens.constrained),
        "constrained/fraction": tokens.constrained / sampled,
        "constrained/forced_tokens": float(tokens.forced),
        "constrained/forced_fraction": tokens.forced / sampled,
        "constrained/forced_rows": float(content.rows_forced),
    }
    if tokens.constrained:
        metrics["constrained/allowed_probability"] = tokens.allowed_mass / tokens.constrained
    return metrics


def _age_metrics(content: BatchReport) -> Metrics:
    """Return the metrics of token ages; none in a synchronous run."""
    ages = content.ages
    if ages is None:
        return {}
    return {
        "async/staleness_mean": ages.staleness_mean,
        "async/staleness_max": float(ages.staleness_max),
        "async/trajectory_age_mean": ages.trajectory_mean,
        "async/trajectory_age_max": float(ages.trajectory_max),
        "async/versions_mean": ages.versions_mean,
        "async/versions_max": float(ages.versions_max),
        "async/stale_tokens": float(content.stale_tokens),
        "async/stale_rows": float(content.rows_stale),
    }


def raise_if_hopeless(
    finished: list[FinishedRollout], failure_reward: float | None, needs_rewards: bool = True
) -> None:
    """Raise an error if no rollout of a batch has a reward.

    Args:
        failure_reward: reward of a rollout whose agent failed; None leaves it out.
        needs_rewards: False if a rollout that succeeded is of use without a reward.

    Raises:
        RewardError: the agent returns a value that is not a reward.
        RolloutsFailedError: all rollouts failed, or none has a reward; the message has the most frequent
            cause.
        EmptyTraceError: failed rollouts have a `failure_reward`, but no rollout called the model.
    """
    if any(effective_reward(item, None) is not None for item in finished):
        return
    if not needs_rewards and any(item.rollout.status == "succeeded" for item in finished):
        return
    if errors := Counter(item.grade_error for item in finished if item.grade_error is not None):
        error, count = errors.most_common(1)[0]
        raise RolloutsFailedError(
            f"none of {len(finished)} rollouts was scored: the group reward failed for {count} of them with "
            f"{error}"
        )
    failures = [item.rollout.failure for item in finished if item.rollout.failure]
    if not failures:
        raise RolloutsFailedError(
            f"none of {len(finished)} rollouts was scored: the agent returns None; return a float, or a dict "
            "of floats"
        )
    error, count = Counter(failure.error for failure in failures).most_common(1)[0]
    example = next(failure for failure in failures if failure.error == error)
    if example.kind == "reward":
        raise RewardError(error.removeprefix("RewardError: "))
    if failure_reward is not None and example.kind not in ("infrastructure", "cancelled"):
        if not any(item.generations for item in finished):
            raise EmptyTraceError(
                f"all {len(finished)} rollouts failed before they called the model: {error}\n{example.trace}"
            )
        return
    advice = ""
    if all(failure.kind == "infrastructure" for failure in failures):
        advice = (
            ". The infrastructure failed them, not the agent: check the service that they called. A training "
            "run that goes on with resume='auto' runs them again"
        )
    raise RolloutsFailedError(
        f"all {len(finished)} rollouts failed, {count} of them with {error}{advice}\n{example.trace}".rstrip()
    )


def explain_no_signal(steps: int) -> str:
    """Return the reason to end training after so many steps without signal."""
    return (
        f"training ends early: in the last {steps} steps no group had rewards that differ. Either the task "
        "is learned, or its reward does not separate good rollouts from bad ones, or no token could be "
        "trained: a schema left the model no choice (constrained/forced_fraction in metrics.jsonl), or calls "
        "are masked (off_policy/fraction)"
    )
