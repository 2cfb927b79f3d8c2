"""Grading of finished groups by the run's group reward, stored so that a group is graded once."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Self

from raylight._utils.aio import task_group
from raylight.errors import GroupRewardError, ServingLostError
from raylight.rewards.group import GroupReward, GroupRollout, call_group_reward, recording
from raylight.rewards.scoring_model import Scorer, ScoringModel, scoring_by
from raylight.semconv import ANNOTATION, GRADE_ERROR, GRADE_SPAN_ID, GRADE_TURNS, reward_attributes
from raylight.store.client import StoreClient
from raylight.traces.reward_spans import find_reward_spans, get_rewards_from_span
from raylight.trainer.components.run_components import RolloutComponents
from raylight.types import Attempt, FinishedRollout, Span, SpanCoreFields

logger = logging.getLogger(__name__)

MAX_GROUPS = 32
"""Groups that are graded at a time, whose spans are in memory."""
GRADE_TIMEOUT_S = 3600.0
"""Longest time for the grades of a group."""


class GroupGrader:
    """Calls a group reward for finished groups, and stores its grades with their attempts.

    Only rollouts that succeeded are graded; a group without any is left as it is. If the function raises, or
    takes too long, the rollouts of the group have no reward, which is stored too. A group that no step took
    yet is then graded again in a resumed run.

    Args:
        note: shows the first failure to the user.
        timeout_s: longest time of a call.
        scorers: the reward models that the run serves.
    """

    def __init__(
        self,
        store: StoreClient,
        function: GroupReward,
        note: Callable[[str], None],
        timeout_s: float = GRADE_TIMEOUT_S,
        scorers: Mapping[ScoringModel, Scorer] | None = None,
    ) -> None:
        self._store, self._function, self._note, self._timeout_s = store, function, note, timeout_s
        self._scorers = scorers or {}
        self._noted = False
        self._room = asyncio.Semaphore(MAX_GROUPS)

    @classmethod
    def of(cls, run: RolloutComponents, note: Callable[[str], None]) -> Self | None:
        """Return the grader of a run; None if it has no group reward."""
        function = run.settings.group_reward
        return None if function is None else cls(run.store, function, note, scorers=run.reward_models.scorers)

    async def grade_all(self, finished: list[FinishedRollout]) -> list[FinishedRollout]:
        """Return decided rollouts with their grades, in the same order.

        Args:
            finished: all rollouts of one or several groups.

        Raises:
            GroupRewardError: the function returned something other than a reward for each rollout, or a
                conversation is too long for a reward model.
            ServingLostError: a reward model did not answer in time.
        """
        groups: dict[str, list[FinishedRollout]] = {}
        for item in finished:
            if item.rollout.status == "succeeded":
                groups.setdefault(item.group, []).append(item)
        graded: dict[str, FinishedRollout] = {}
        async with task_group() as tasks:
            grading = [tasks.create_task(self._grade_one(group)) for group in groups.values()]
        for task in grading:
            graded |= {item.rollout.rollout_id: item for item in task.result()}
        return [graded.get(item.rollout.rollout_id, item) for item in finished]

    async def _grade_one(self, group: list[FinishedRollout]) -> list[FinishedRollout]:
        """Return the rollouts of a group with their grades, those that are stored if there are."""
        if all(map(_is_graded, group)):
            return group
        async with self._room:
            return await self._grade(group)

    async def _grade(self, group: list[FinishedRollout]) -> list[FinishedRollout]:
        ids = [item.rollout.rollout_id for item in group]
        stored = await self._store.collect(ids, with_spans=True, with_span_tokens=False)
        ungraded = list(map(_without_grade, stored))  # a group may have some grades, and lost rollouts
        error: str | None = None
        with recording() as recorded, scoring_by(self._scorers):
            try:
                rewards = await self._call(list(map(GroupRollout, ungraded)))
            except (GroupRewardError, ServingLostError):
                raise
            except Exception as failure:  # the user's code, or the judge
                error, rewards = f"{type(failure).__name__}: {failure}", [{}] * len(group)
                self._show(failure)
        grades = [
            # given rewards go first; without any, the rollout is not scored
            given and {**given, **item.rewards, **given}
            for item, given in zip(ungraded, rewards, strict=True)
        ]
        first = stored[0].rollout.attempt
        assert first is not None, "a rollout that succeeded has an attempt"
        spans = [_span(first, core, secrets.token_hex(8)) for core in recorded.spans]
        graded = {
            item.rollout.rollout_id: _grade_span(
                item, given, error, recorded.turns.get(item.rollout.rollout_id, {}) if given else {}
            )
            for item, given in zip(stored, grades, strict=True)
            if not _is_graded(item)
        }
        await self._store.grade([*spans, *graded.values()])
        return [
            item if _is_graded(item) else _with_grade(item, given, error, graded[item.rollout.rollout_id])
            for item, given in zip(group, grades, strict=True)
        ]

    async def _call(self, group: list[GroupRollout]) -> list[dict[str, float]]:
        """Call the function.

        Raises:
            TimeoutError: it took too long.
        """
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                return await call_group_reward(self._function, group)
        except TimeoutError:
            if not limit.expired():
                raise
        raise TimeoutError(
            f"it took more than {self._timeout_s:g} s for a group of {len(group)}; limit the time of what it "
            "waits for"
        )

    def _show(self, failure: Exception) -> None:
        logger.debug("the group reward failed", exc_info=failure)
        if not self._noted:
            self._noted = True
            self._note(
                "the group reward failed, and its rollouts are not scored (train/grades_failed counts them): "
                f"{type(failure).__name__}: {failure}"
            )


def _is_graded(item: FinishedRollout) -> bool:
    """Return True for a rollout whose grade is final."""
    return item.graded and item.grade_error is None


def _without_grade(item: FinishedRollout) -> FinishedRollout:
    """Return a rollout with the agent's own rewards, from its spans, in place of a grade."""
    if not item.graded:
        return item
    emitted = find_reward_spans(span for span in item.spans if span.span_id != GRADE_SPAN_ID)
    own = {reward.name: reward.value for span in emitted[-1:] for reward in get_rewards_from_span(span)}
    return replace(item, reward=next(iter(own.values()), None), rewards=own, graded=False, grade_error=None)


def _with_grade(
    item: FinishedRollout, rewards: dict[str, float], error: str | None, span: Span
) -> FinishedRollout:
    """Return a rollout with its grade, whose span is kept if it has rewards of turns."""
    return replace(
        item,
        spans=[*item.spans, span] if GRADE_TURNS in span.attributes else item.spans,
        reward=next(iter(rewards.values()), None),
        rewards=rewards,
        graded=True,
        grade_error=error,
    )


def _grade_span(
    item: FinishedRollout, rewards: dict[str, float], error: str | None, turns: dict[str, float]
) -> Span:
    """Return the span of a grade; without rewards it says that the rollout is not scored.

    Args:
        turns: rewards of turns, by call id.
    """
    attributes = dict(reward_attributes(rewards)) | ({} if error is None else {GRADE_ERROR: error[:1000]})
    attributes |= {GRADE_TURNS: json.dumps(turns)} if turns else {}
    assert item.rollout.attempt is not None
    now = time.time()
    core = SpanCoreFields(name=ANNOTATION, attributes=attributes, start_time=now, end_time=now)
    return _span(item.rollout.attempt, core, GRADE_SPAN_ID)


def _span(attempt: Attempt, core: SpanCoreFields, span_id: str) -> Span:
    return Span(
        **core.model_dump(),
        rollout_id=attempt.rollout_id,
        attempt_id=attempt.attempt_id,
        sequence_id=0,
        trace_id=secrets.token_hex(16),
        span_id=span_id,
        parent_id=None,
    )
