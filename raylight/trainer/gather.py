"""Collect the rollouts of one training step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from raylight.aio import task_group
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.experience.rewards import group_key, turn_reward_spans
from raylight.trainer.outcome import raise_if_hopeless
from raylight.trainer.policy_rollouts import PolicyRollouts
from raylight.trainer.report import Report
from raylight.types import FinishedRollout


async def gather(
    rollouts: PolicyRollouts,
    algorithm: PolicyAlgorithm,
    batches: Iterator[list[Any]],
    step: int,
    report: Report,
) -> list[FinishedRollout]:
    """Roll out the next batch of tasks, and up to `max_rounds` batches until `tasks_per_step` groups have
    differing rewards.

    Raises:
        RaylightError: no rollout of a round has a reward (see `raise_if_hopeless`).
    """
    finished: list[FinishedRollout] = []
    for part in range(algorithm.max_rounds):
        new = await _round(rollouts, algorithm, next(batches), step, part, report)
        finished += new
        is_last = part + 1 == algorithm.max_rounds
        if is_last or count_informative_groups(finished, algorithm) >= algorithm.tasks_per_step:
            break
        raise_if_hopeless(new, algorithm.failure_reward)
    return finished


def count_informative_groups(finished: list[FinishedRollout], algorithm: PolicyAlgorithm) -> int:
    """Return the number of groups whose rewards are not all equal; turn rewards count where they are trained
    on."""
    rewards_by_group: dict[str, set[float]] = {}
    for item in finished:
        if item.generations and (reward := algorithm.reward_of(item)) is not None:
            turns = [value for _, value in turn_reward_spans(item)] if algorithm.turn_rewards else []
            rewards_by_group.setdefault(group_key(item), set()).add(math.fsum([reward, *turns]))
    return sum(len(rewards) > 1 for rewards in rewards_by_group.values())


async def _round(
    rollouts: PolicyRollouts,
    algorithm: PolicyAlgorithm,
    tasks: list[Any],
    step: int,
    part: int,
    report: Report,
) -> list[FinishedRollout]:
    progress = report.rollout_progress("train")
    sampled = rollouts.rollout(tasks, "train", algorithm.group_size, progress, step=step, part=part)
    if not algorithm.needs_greedy_rollouts:
        return await sampled
    async with task_group() as group:
        samples = group.create_task(sampled)
        greedy = group.create_task(rollouts.rollout_greedily(tasks, step, part))
    return [*samples.result(), *greedy.result()]
