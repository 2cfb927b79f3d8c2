"""Outcome of a step: its metrics, and whether it gives anything to learn from."""

import pytest
from unit_helpers import make_finished

from raylight.errors import (
    EmptyTraceError,
    RewardError,
    RolloutsFailedError,
)
from raylight.experience.batches.batch import BatchRules, build_batch
from raylight.experience.trajectories.reward_rules import RewardRules
from raylight.experience.trajectories.staleness import StaleMask
from raylight.trainer.loops.batch_metrics import describe, raise_if_hopeless
from raylight.types import GREEDY, Failure

BROKEN = Failure(kind="agent", error="ValueError: no tool", trace="  File agent.py, line 3")
LOST = Failure(kind="infrastructure", error="APIConnectionError: refused")


def test_one_reward_is_enough_to_go_on() -> None:
    raise_if_hopeless([make_finished(failure=BROKEN), make_finished(0.0)], None)


def test_a_batch_of_failures_ends_with_the_most_frequent_reason_and_its_trace() -> None:
    with pytest.raises(
        RolloutsFailedError,
        match=r"(?s)all 3 .* failed, 2 of them with ValueError: no tool.*agent\.py, line 3",
    ):
        raise_if_hopeless([make_finished(failure=f) for f in (LOST, BROKEN, BROKEN)], None)


def test_a_batch_without_any_score_says_that_the_agent_returns_none() -> None:
    with pytest.raises(RolloutsFailedError, match=r"none of 2 rollouts was scored.*None"):
        raise_if_hopeless([make_finished(None), make_finished(None)], 0.0)


def test_rollouts_without_rewards_are_of_use_to_a_teacher() -> None:
    raise_if_hopeless([make_finished(None), make_finished(failure=BROKEN)], None, needs_rewards=False)
    with pytest.raises(RolloutsFailedError, match="no tool"):
        raise_if_hopeless([make_finished(failure=BROKEN)], None, needs_rewards=False)


def test_a_wrong_reward_keeps_its_own_message() -> None:
    failure = Failure(kind="reward", error="RewardError: the agent returned 'good'")
    for failure_reward in (None, 0.0):
        with pytest.raises(RewardError, match=r"^the agent returned 'good'$"):
            raise_if_hopeless([make_finished(failure=failure)], failure_reward)


def test_failures_with_a_reward_are_learned_from_unless_none_called_the_model() -> None:
    raise_if_hopeless([make_finished(failure=BROKEN)], -1.0)
    with pytest.raises(EmptyTraceError, match=r"ValueError: no tool"):
        raise_if_hopeless([make_finished(failure=BROKEN, calls=0)], -1.0)


def test_a_lost_infrastructure_is_never_learned_from() -> None:
    with pytest.raises(RolloutsFailedError, match="APIConnectionError"):
        raise_if_hopeless([make_finished(failure=LOST)], 0.0)


def test_greedy_rollouts_are_not_described() -> None:
    sampled = [make_finished(1.0, group="g"), make_finished(0.0, group="g")]
    greedy = make_finished(0.25, group="g")
    greedy.rollout.metadata[GREEDY] = True
    content = build_batch(sampled, BatchRules())[1]
    alone, together = (describe(finished, content, seconds=1.0) for finished in (sampled, [*sampled, greedy]))
    assert (together["train/rollouts"], together["train/reward"]) == (2, 0.5)
    tokens = together.pop("train/tokens_per_s") - alone.pop("train/tokens_per_s")
    assert tokens == sum(len(call.output_ids) for call in greedy.generations) > 0
    assert together == alone


def test_a_step_is_described_by_its_rollouts() -> None:
    finished = [make_finished(1.0, calls=2), make_finished(0.0), make_finished(failure=BROKEN, calls=0)]
    metrics = describe(finished, build_batch(finished, BatchRules())[1], seconds=2.0)
    assert metrics["train/rollouts"] == 3
    assert (metrics["train/trained"], metrics["train/failed"]) == (2, 1)
    assert (metrics["train/reward"], metrics["train/reward_std"]) == (0.5, 0.5)
    assert (metrics["train/response_tokens"], metrics["train/calls"], metrics["train/tokens_per_s"]) == (
        1.0,
        1.0,
        1.5,
    )


def test_dropped_spans_are_counted() -> None:
    finished = [make_finished(1.0), make_finished(0.0), make_finished(0.5)]
    for item, count in zip(finished, (900, 50, None), strict=True):
        item.rollout.attempt.metadata = {"spans_dropped": count} if count else None
    metrics = describe(finished, build_batch(finished, BatchRules())[1], seconds=2.0)
    assert metrics["trace/spans_dropped"] == 950


def test_failures_with_a_reward_count_as_failed_and_in_the_mean() -> None:
    finished = [
        make_finished(1.0),
        make_finished(1.0),
        make_finished(failure=BROKEN),
        make_finished(failure=LOST),
    ]
    for failure_reward, reward in ((None, 1.0), (0.0, 2 / 3), (-1.0, 1 / 3)):
        content = build_batch(finished, BatchRules(rewards=RewardRules(failure_reward)))[1]
        metrics = describe(finished, content, 1.0, failure_reward)
        assert metrics["train/failed"] == 2
        assert metrics["train/reward"] == pytest.approx(reward)


def test_a_step_without_rewards_or_calls_says_nothing_about_them() -> None:
    finished = [make_finished(failure=LOST, calls=0)]
    metrics = describe(finished, build_batch(finished, BatchRules())[1], seconds=1.0)
    assert not {"train/reward", "train/reward_std", "train/response_tokens", "train/calls"} & set(metrics)


def test_the_ages_of_tokens_are_metrics_of_an_asynchronous_run() -> None:
    finished = [make_finished(1.0), make_finished(0.0)]
    rules = BatchRules(stale=StaleMask(version=3, limit=3))
    metrics = describe(finished, build_batch(finished, rules)[1], 1.0)
    assert {name: value for name, value in metrics.items() if name.startswith("async/")} == {
        "async/staleness_mean": 3.0,
        "async/staleness_max": 3.0,
        "async/trajectory_age_mean": 3.0,
        "async/trajectory_age_max": 3.0,
        "async/versions_mean": 1.0,
        "async/versions_max": 1.0,
        "async/stale_tokens": 0.0,
        "async/stale_rows": 0.0,
    }
    masked = build_batch(finished, BatchRules(stale=StaleMask(version=3, limit=2)))[1]
    assert describe(finished, masked, 1.0)["async/stale_rows"] == 2.0
    synchronous = build_batch(finished, BatchRules())[1]
    assert not any(name.startswith("async/") for name in describe(finished, synchronous, 1.0))
