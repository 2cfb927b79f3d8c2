"""Grades of groups: stored once with their attempts, and read like the agent's own rewards."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from store_helpers import BROKEN, Box, open_box, reward_of, span_of

from raylight.errors import GroupRewardError, RolloutsFailedError
from raylight.experience.trajectories.reward_rules import graded_turns, turn_reward_spans
from raylight.rewards.group import GroupRollout, record, record_turns
from raylight.semconv import reward_attributes
from raylight.trainer.loops.batch_metrics import raise_if_hopeless
from raylight.trainer.loops.group_grader import GroupGrader
from raylight.trainer.output.stored_rollouts import StoredRollouts
from raylight.types import FinishedRollout, SpanCoreFields


class CountedReward:
    """Group reward that ranks rollouts by their own rewards, and counts its calls."""

    def __init__(self) -> None:
        self.groups: list[int] = []

    async def __call__(self, group: list[GroupRollout]) -> list[Any]:
        self.groups.append(len(group))
        record(SpanCoreFields(name="judged"))
        order = sorted(range(len(group)), key=lambda index: group[index].reward or 0.0)
        return [{"rank": float(order.index(index))} for index in range(len(group))]


async def finish_group(box: Box, group: str, rewards: list[float | None]) -> list[str]:
    """Finish a group of rollouts with these rewards; None fails a rollout."""
    ids = []
    for reward in rewards:
        await box.store.enqueue_rollout("task", group_id=group)
        rollout = await box.again()
        ids.append(rollout.rollout_id)
        if reward is None:
            await box.store.finish_attempt(rollout, "failed", failure=BROKEN)
        else:
            emitted = span_of(
                rollout,
                "agentlightning.annotation",
                attributes=reward_attributes({"own": reward, "more": 7.0}),
            )
            await box.store.finish_attempt(rollout, "succeeded", spans=[reward_of(rollout, 0.25), emitted])
    return ids


async def test_a_group_is_graded_once_also_after_a_restart(tmp_path: Path) -> None:
    function = CountedReward()
    async with open_box(tmp_path / "store.db") as box:
        ids = await finish_group(box, "g", [0.5, None, 0.1, 0.9])
        grader = GroupGrader(box.store, function, print)
        graded = await grader.grade_all(await box.store.collect(ids))
        assert [item.rewards for item in graded] == [
            {"rank": 1.0, "own": 0.5, "more": 7.0},
            {},
            {"rank": 0.0, "own": 0.1, "more": 7.0},
            {"rank": 2.0, "own": 0.9, "more": 7.0},
        ]
    async with open_box(tmp_path / "store.db") as box:
        stored = await box.store.collect(ids)
        assert [item.graded for item in stored] == [True, False, True, True]
        again = await GroupGrader(box.store, function, print).grade_all(stored)
        for found in (stored, again):
            assert [(item.reward, item.rewards) for item in found] == [
                (item.reward, item.rewards) for item in graded
            ]
        assert function.groups == [3]
        spans = (await box.store.collect(ids[:1], with_spans=True))[0].spans
        assert [span.name for span in spans].count("judged") == 1
        # the grade replaces the agent's final reward, which does not become a reward of a turn
        (item,) = await box.store.collect(ids[:1], with_spans=True)
        assert [value for _, value in turn_reward_spans(item)] == [0.25]


async def test_a_rollout_that_is_repeated_is_compared_with_the_agents_rewards_of_the_others() -> None:
    """It was lost when the others were graded."""
    async with open_box() as box:
        ids = await finish_group(box, "g", [0.5, 0.9])
        grader = GroupGrader(box.store, CountedReward(), print)
        await grader.grade_all(await box.store.collect(ids))
        ids += await finish_group(box, "g", [0.1])
        graded = await grader.grade_all(await box.store.collect(ids))
        assert [item.reward for item in graded] == [0.0, 1.0, 0.0]


async def test_rewards_of_turns_are_stored_with_the_grade(tmp_path: Path) -> None:
    def score_turns(group: list[GroupRollout]) -> list[float | None]:
        for item in group:
            record_turns(item.finished.rollout.rollout_id, {"call-1": item.reward or 0.0})
        return [None, 1.0]

    async with open_box(tmp_path / "store.db") as box:
        ids = await finish_group(box, "g", [0.5, 0.9])
        graded = await GroupGrader(box.store, score_turns, print).grade_all(await box.store.collect(ids))
        stored = await box.store.collect(ids, with_spans=True)
        for found in (graded, stored):
            assert list(map(graded_turns, found)) == [{}, {"call-1": 0.9}]
            assert [item.reward for item in found] == [None, 1.0]
        assert [value for _, value in turn_reward_spans(stored[1])] == [0.25]


async def test_groups_are_graded_apart_and_none_without_a_success() -> None:
    function = CountedReward()
    async with open_box() as box:
        ids = await finish_group(box, "a", [0.5]) + await finish_group(box, "b", [None, None])
        ids += await finish_group(box, "c", [0.1, 0.2])
        grader = GroupGrader(box.store, function, print)
        graded = await grader.grade_all(await box.store.collect(ids))
        assert sorted(function.groups) == [1, 2]
        assert [item.rollout.rollout_id for item in graded] == ids
        assert [item.reward for item in graded] == [0.0, None, None, 0.0, 1.0]


async def test_a_failed_group_reward_is_stored_counted_and_shown_once(tmp_path: Path) -> None:
    notes: list[str] = []

    def broken(group: list[GroupRollout]) -> list[float]:
        raise ConnectionError("the judge is away")

    async with open_box(tmp_path / "store.db") as box:
        ids = await finish_group(box, "a", [0.5, 0.1]) + await finish_group(box, "b", [0.5])
        graded = await GroupGrader(box.store, broken, notes.append).grade_all(await box.store.collect(ids))
        stored = await box.store.collect(ids)
        for item in (*graded, *stored):  # not the agent's own reward, which has another scale
            assert (item.reward, item.rewards, item.graded) == (None, {}, True)
            assert item.grade_error == "ConnectionError: the judge is away"
        lines = StoredRollouts(tmp_path / "store.db").lines  # what SFT, DPO and exports choose from
        assert [line.reward for line in lines()] == [None, None, None]
        assert len(notes) == 1
        assert "the judge is away" in notes[0]
        with pytest.raises(RolloutsFailedError, match="the group reward failed for 3 of them"):
            raise_if_hopeless(stored, None)
        # a resumed run grades what no step took again
        function = CountedReward()
        again = await GroupGrader(box.store, function, print).grade_all(stored)
        assert [item.reward for item in again] == [1.0, 0.0, 0.0]
        assert [item.reward for item in await box.store.collect(ids)] == [1.0, 0.0, 0.0]
        assert [line.reward for line in lines()] == [1.0, 0.0, 0.0]
        await GroupGrader(box.store, function, print).grade_all(await box.store.collect(ids))
        assert sorted(function.groups) == [1, 2]


@pytest.mark.parametrize("is_plain", [True, False])
async def test_a_group_reward_that_hangs_is_abandoned(is_plain: bool) -> None:
    leave, notes = threading.Event(), list[str]()

    def hang(group: list[GroupRollout]) -> list[float]:
        leave.wait(60)
        return [1.0] * len(group)

    async def wait(group: list[GroupRollout]) -> list[float]:
        await asyncio.Event().wait()
        return []

    async with open_box() as box:
        ids = await finish_group(box, "a", [0.5, 0.1])
        grader = GroupGrader(box.store, hang if is_plain else wait, notes.append, timeout_s=0.05)
        graded = await grader.grade_all(await box.store.collect(ids))
        assert [item.reward for item in graded] == [None, None]
        assert "TimeoutError: it took more than 0.05 s for a group of 2" in notes[0]
    leave.set()


async def test_a_wrong_result_ends_the_run_and_stores_nothing() -> None:
    async with open_box() as box:
        ids = await finish_group(box, "a", [0.5, 0.1])
        with pytest.raises(GroupRewardError, match="returned 1 rewards for 2 rollouts"):
            await GroupGrader(box.store, lambda group: [1.0], print).grade_all(await box.store.collect(ids))
        found: list[FinishedRollout] = await box.store.collect(ids)
        assert [item.reward for item in found] == [0.5, 0.1]


async def test_a_rollout_that_is_not_scored_has_no_reward() -> None:
    async with open_box() as box:
        ids = await finish_group(box, "a", [0.5, 0.1])
        await GroupGrader(box.store, lambda group: [None, 2.0], print).grade_all(await box.store.collect(ids))
        first, second = await box.store.collect(ids)
        assert (first.reward, first.graded, first.grade_error) == (None, True, None)
        assert second.reward == 2.0
