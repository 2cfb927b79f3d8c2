"""Named rewards that are normalised apart (GDPO), from rollouts to a batch."""

from dataclasses import replace
from typing import Any

import pytest
from judged_group import rollout

import raylight as rl
from raylight.config import LearnerConfig
from raylight.errors import RewardError
from raylight.experience.batches.batch import build_batch
from raylight.types import Attempt, Failure, FinishedRollout, Trajectory


def item(number: int, group: str, **rewards: float) -> FinishedRollout:
    """A rollout of a group with these rewards, and one call of two tokens."""
    found = rollout(number, "x", next(iter(rewards.values()), None), 2).finished
    state = found.rollout.model_copy(update={"group_id": group})
    return replace(found, rollout=state, rewards=rewards)


def failed(found: FinishedRollout) -> FinishedRollout:
    ids: dict[str, Any] = {"rollout_id": found.rollout.rollout_id, "attempt_id": "at", "sequence_id": 1}
    failure = Failure(kind="agent", error="ValueError: no")
    attempt = Attempt(**ids, status="failed", start_time=0.0, failure=failure)
    state = found.rollout.model_copy(update={"status": "failed", "attempt": attempt})
    return replace(found, rollout=state, reward=None, rewards={})


def gdpo(**settings: Any) -> rl.algorithms.GDPO:
    return rl.algorithms.GDPO(model="m", reward_weights={"right": 1.0, "short": 0.5}, **settings)


def test_a_batch_has_the_named_rewards_in_the_order_of_the_weights() -> None:
    group = [item(0, "g", short=1.0, right=0.0, other=7.0), item(1, "g", short=0.0, right=1.0)]
    batch, report = build_batch(group, gdpo().batch_rules(LearnerConfig()))
    assert batch.parts == [(0.0, 1.0), (1.0, 0.0)]
    assert batch.rewards == [0.5, 1.0]
    assert report.has_signal
    assert all(isinstance(row, Trajectory) for row in batch.rows)
    assert build_batch(group, rl.GRPO(model="m").batch_rules(LearnerConfig()))[0].parts is None


def test_a_group_has_signal_if_any_reward_differs() -> None:
    equal_sums = [item(0, "g", right=0.5, short=0.0), item(1, "g", right=0.0, short=1.0)]
    equal = [item(2, "h", right=0.5, short=1.0), item(3, "h", right=0.5, short=1.0)]
    algorithm = gdpo(zero_variance_groups="drop")
    batch, report = build_batch([*equal_sums, *equal], algorithm.batch_rules(LearnerConfig()))
    assert (report.groups_without_signal, report.zero_variance, batch.groups) == (1, 2, ["g", "g"])
    for group, expected in ((equal_sums, True), (equal, False)):
        assert algorithm.batch_rules(LearnerConfig()).is_informative(group) == expected


def test_a_missing_name_raises_and_a_failed_rollout_has_the_failure_reward_for_each() -> None:
    with pytest.raises(
        RewardError, match="has the rewards right, and lacks short, which reward_weights names"
    ):
        gdpo().reward_rules.reward(item(0, "g", right=1.0))
    lost = failed(item(0, "g", right=1.0, short=1.0))
    assert (gdpo().reward_rules.reward(lost), gdpo().reward_rules.parts(lost)) == (None, None)
    assert gdpo(failure_reward=-1.0).reward_rules.parts(lost) == (-1.0, -1.0)
    assert gdpo(failure_reward=-1.0).reward_rules.reward(lost) == -1.5
