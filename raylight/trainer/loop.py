"""The synchronous loop: roll out, update, publish, validate. What it learns is the algorithm's settings; where, the session's."""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from raylight.algorithms.policy import PolicyAlgorithm
from raylight.errors import EmptyTraceError, RewardError, RolloutsFailedError
from raylight.learner.batch import COUNTED_AS, BatchReport, build_batch, scored
from raylight.trainer.policy_session import PolicySession
from raylight.trainer.report import Metrics, Report
from raylight.types import FinishedRollout


async def train(
    session: PolicySession, algorithm: PolicyAlgorithm, train_tasks: list[Any], val_tasks: list[Any], report: Report
) -> None:
    """Train for the planned number of steps, reporting each."""
    total = session.plan.total_steps
    tasks = _batches(train_tasks, algorithm.tasks_per_step, session.plan.seed)
    if val_tasks and algorithm.val_before_train:
        report.step(0, await _validate(session, algorithm, val_tasks, report))
    without_signal = 0
    for step in range(1, total + 1):
        metrics, learned = await _step(session, algorithm, next(tasks), report)
        without_signal = 0 if learned else without_signal + 1
        stop = without_signal >= algorithm.max_steps_without_signal
        due = algorithm.val_every and step % algorithm.val_every == 0
        if val_tasks and (due or stop or step == total):
            metrics |= await _validate(session, algorithm, val_tasks, report)
        report.step(step, metrics)
        if stop:
            report.note(
                f"no group showed a difference for {without_signal} steps in a row, so training ends early: either the task is "
                "learned, or its reward does not tell good from bad"
            )
            break


async def _step(session: PolicySession, algorithm: PolicyAlgorithm, tasks: list[Any], report: Report) -> tuple[Metrics, bool]:
    """One step; returns its metrics and whether there was anything to learn from."""
    started = time.perf_counter()
    finished = await session.rollout(tasks, "train", algorithm.group_size, report.rolling("train"))
    rollout_s = time.perf_counter() - started
    report.failures(finished)
    raise_if_hopeless(finished, algorithm.failure_reward)
    batch, content = build_batch(
        finished, algorithm.failure_reward, min_group=min(algorithm.group_size, 2), trained_agents=session.plan.trained_agents
    )
    metrics = describe(finished, content, rollout_s)
    report.drift(content)
    if not content.has_signal:
        return metrics, False
    started = time.perf_counter()
    metrics |= await session.update(batch)
    updated = time.perf_counter()
    version, parity = await session.publish_weights(algorithm.sync_timeout_s)
    metrics |= {"weights/version": float(version), "mismatch/probe_abs_mean": parity.mean_abs}
    metrics["time/update_s"] = updated - started
    metrics["time/sync_s"] = time.perf_counter() - updated
    return metrics, True


async def _validate(session: PolicySession, algorithm: PolicyAlgorithm, tasks: list[Any], report: Report) -> Metrics:
    """Mean reward over the validation tasks. A rollout that failed counts with `failure_reward`, or is left out."""
    started = time.perf_counter()
    finished = await session.rollout(tasks, "val", algorithm.val_samples, report.rolling("val"))
    report.failures(finished)
    raise_if_hopeless(finished, algorithm.failure_reward)
    rewards = [reward for item in finished if (reward := scored(item, algorithm.failure_reward)) is not None]
    failed = sum(item.rollout.status != "succeeded" for item in finished)
    metrics = {"val/failed": float(failed), "time/val_s": time.perf_counter() - started}
    return metrics | ({"val/reward": statistics.fmean(rewards)} if rewards else {})


def describe(finished: list[FinishedRollout], content: BatchReport, seconds: float) -> Metrics:
    """What a batch of rollouts was like."""
    rewards = [reward for item in finished if (reward := scored(item, None)) is not None]
    lengths = [len(call.output_ids) for item in finished for call in item.generations]
    metrics = {
        "train/rollouts": float(len(finished)),
        "train/trained": float(content.trained),
        "train/failed": float(content.failed),
        "train/unscored": float(content.unscored),
        "train/empty": float(content.empty),
        "train/alone": float(content.alone),
        "train/groups_without_signal": float(content.groups_without_signal),
        "train/aborted": float(content.aborted),
        "train/other_agents": float(content.other_agents),
        **{f"trace/{name}": float(getattr(content, name)) for name in ("calls", *COUNTED_AS.values())},
        "time/rollout_s": seconds,
        "train/tokens_per_s": sum(lengths) / seconds,
    }
    if rewards:
        metrics |= {"train/reward": statistics.fmean(rewards), "train/reward_std": statistics.pstdev(rewards)}
    if lengths:
        metrics |= {"train/response_tokens": statistics.fmean(lengths), "train/calls": len(lengths) / len(finished)}
    return metrics


def raise_if_hopeless(finished: list[FinishedRollout], failure_reward: float | None) -> None:
    """Raise when no rollout of a batch gave a reward.

    Raises:
        RewardError: the agent returns something that is no reward.
        RolloutsFailedError: all failed, or none was scored; the message has the most frequent reason.
        EmptyTraceError: all failures have a reward, but no rollout called the model.
    """
    if any(scored(item, None) is not None for item in finished):
        return
    failures = [item.rollout.attempt.failure for item in finished if item.rollout.attempt and item.rollout.attempt.failure]
    if not failures:
        raise RolloutsFailedError(
            f"none of {len(finished)} rollouts was scored: the agent returns None; return a float, or a dict of floats"
        )
    error, count = Counter(failure.error for failure in failures).most_common(1)[0]
    example = next(failure for failure in failures if failure.error == error)
    if example.kind == "reward":
        raise RewardError(error.removeprefix("RewardError: "))
    if failure_reward is not None and example.kind not in ("infrastructure", "cancelled"):
        if not any(item.generations for item in finished):
            raise EmptyTraceError(f"all {len(finished)} rollouts failed before they called the model: {error}\n{example.trace}")
        return
    raise RolloutsFailedError(
        f"all {len(finished)} rollouts failed, {count} of them with {error}\n{example.trace}".rstrip()
    )  # fmt: skip


def _batches(tasks: list[Any], size: int, seed: int) -> Iterator[list[Any]]:
    """Batches of tasks without end; each pass over the tasks is shuffled anew, and a batch may span two passes."""
    shuffle = random.Random(seed).shuffle
    waiting: list[Any] = []
    while True:
        while len(waiting) < size:
            more = list(tasks)
            shuffle(more)
            waiting += more
        batch, waiting = waiting[:size], waiting[size:]
        yield batch
