"""The rollouts that one step learns from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from raylight.aio import task_group
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.experience.rewards import group_key, turn_reward_spans
from raylight.trainer.outcome import raise_if_hopeless
from raylight.trainer.policy_session import PolicySession
from raylight.trainer.report import Report
from raylight.types import FinishedRollout


async def gather(
    session: PolicySession, algorithm: PolicyAlgorithm, tasks: Iterator[list[Any]], step: int, report: Report
) -> list[FinishedRollout]:
    """Roll out the next tasks; and more of them, up to `max_rounds` times, until `tasks_per_step` groups have rewards that differ.

    Raises:
        RaylightError: no rollout of a round gave a reward (`raise_if_hopeless`).
    """
    finished: list[FinishedRollout] = []
    for part in range(algorithm.max_rounds):
        found = await _round(session, algorithm, next(tasks), step, part, report)
        finished += found
        if (
            part + 1 == algorithm.max_rounds
            or groups_that_differ(finished, algorithm) >= algorithm.tasks_per_step
        ):
            break
        raise_if_hopeless(found, algorithm.failure_reward)
    return finished


def groups_that_differ(finished: list[FinishedRollout], algorithm: PolicyAlgorithm) -> int:
    """Groups in which not all rewards are equal, with those of turns where these are trained."""
    seen: dict[str, set[float]] = {}
    for item in finished:
        if item.generations and (reward := algorithm.reward_of(item)) is not None:
            turns = [value for _, value in turn_reward_spans(item)] if algorithm.turn_rewards else []
            seen.setdefault(group_key(item), set()).add(math.fsum([reward, *turns]))
    return sum(len(rewards) > 1 for rewards in seen.values())


async def _round(
    session: PolicySession, algorithm: PolicyAlgorithm, tasks: list[Any], step: int, part: int, report: Report
) -> list[FinishedRollout]:
    progress = report.rolling("train")
    sampled = session.rollout(tasks, "train", algorithm.group_size, progress, step=step, part=part)
    if not algorithm.needs_greedy_rollouts:
        return await sampled
    async with task_group() as group:
        samples = group.create_task(sampled)
        greedy = group.create_task(session.rollout_greedily(tasks, step, part))
    return [*samples.result(), *greedy.result()]
