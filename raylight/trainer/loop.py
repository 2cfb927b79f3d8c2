"""The synchronous loop: roll out, update, publish, validate. What it learns is the algorithm's settings; where, the session's."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

from raylight.algorithms.policy import PolicyAlgorithm
from raylight.learner.batch import build_batch
from raylight.trainer.evaluation import validate
from raylight.trainer.outcome import describe, raise_if_hopeless
from raylight.trainer.policy_session import PolicySession
from raylight.trainer.report import Metrics, Report


async def train(
    session: PolicySession, algorithm: PolicyAlgorithm, train_tasks: list[Any], val_tasks: list[Any], report: Report
) -> None:
    """Train for the planned number of steps, reporting each."""
    total = session.plan.total_steps
    tasks = _batches(train_tasks, algorithm.tasks_per_step, session.plan.seed)
    if val_tasks and algorithm.val_before_train:
        report.step(0, await validate(session, algorithm, val_tasks, report))
    without_signal = 0
    for step in range(1, total + 1):
        metrics, learned = await _step(session, algorithm, next(tasks), report)
        without_signal = 0 if learned else without_signal + 1
        stop = without_signal >= algorithm.max_steps_without_signal
        due = algorithm.val_every and step % algorithm.val_every == 0
        if val_tasks and (due or stop or step == total):
            metrics |= await validate(session, algorithm, val_tasks, report)
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
