"""How good the policy is on tasks that it is never trained on."""

from __future__ import annotations

import statistics
import time
from typing import Any

from raylight.algorithms.policy import PolicyAlgorithm
from raylight.learner.batch import scored
from raylight.trainer.outcome import raise_if_hopeless
from raylight.trainer.policy_session import PolicySession
from raylight.trainer.report import Metrics, Report


async def validate(session: PolicySession, algorithm: PolicyAlgorithm, tasks: list[Any], report: Report) -> Metrics:
    """Mean reward over the validation tasks. A rollout that failed counts with `failure_reward`, or is left out."""
    started = time.perf_counter()
    finished = await session.rollout(tasks, "val", algorithm.val_samples, report.rolling("val"))
    report.failures(finished)
    raise_if_hopeless(finished, algorithm.failure_reward)
    rewards = [reward for item in finished if (reward := scored(item, algorithm.failure_reward)) is not None]
    failed = sum(item.rollout.status != "succeeded" for item in finished)
    metrics = {"val/failed": float(failed), "time/val_s": time.perf_counter() - started}
    return metrics | ({"val/reward": statistics.fmean(rewards)} if rewards else {})
