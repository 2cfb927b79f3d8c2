"""Staleness of tokens: what is masked, what is counted, and the version that a group is as old as."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import make_finished, make_generation, make_key

import raylight as rl
from raylight.config import LearnerConfig
from raylight.errors import ConfigError
from raylight.experience.batches.batch import BatchReport, TrainBatch, build_batch
from raylight.types import FinishedRollout

VERSION = 5


def sampled(versions: list[int], reward: float | None = 1.0, **call: Any) -> FinishedRollout:
    """Return a rollout with one call whose tokens have these versions."""
    finished = make_finished(reward)
    key = make_key(finished.rollout.rollout_id)
    generation = make_generation([1, 2], [9 + i for i in range(len(versions))], key=key, versions=versions)
    return dataclasses.replace(finished, generations=[dataclasses.replace(generation, **call)])


def build(finished: list[FinishedRollout], **settings: Any) -> tuple[TrainBatch, BatchReport]:
    algorithm = rl.GRPO(model="m", **{"max_staleness": 2, **settings})
    return build_batch(finished, algorithm.batch_rules(LearnerConfig(), version=VERSION))


def test_tokens_that_are_too_old_are_masked_and_the_rewards_count() -> None:
    finished = [sampled([1, 2, 3, 4], 1.0), sampled([1, 2], 0.0), sampled([5, 5], 0.5)]
    batch, report = build(finished, stale="mask")
    assert [row.mask.tolist() for row in batch.rows] == [[0, 0, 0, 0, 1, 1], [0, 0, 1, 1]]
    assert batch.rows[0].weight_versions.tolist() == [-1, -1, -1, -1, 3, 4]
    assert batch.rows[0].logprobs.tolist() == [0, 0, 0, 0, -1, -1]
    assert batch.owners == [0, 2]
    assert batch.rewards == [1.0, 0.0, 0.5], "all rewards are in the group's statistics"
    assert (report.rows_stale, report.stale_tokens, report.rows_forced, report.trained) == (1, 4, 0, 3)
    assert report.has_signal


@pytest.mark.parametrize("stale", ["wait", "drop"])
def test_no_treatment_trains_tokens_that_are_too_old(stale: str) -> None:
    batch, report = build([sampled([1, 5], 1.0), sampled([5], 0.0)], stale=stale)
    assert [row.trained_tokens for row in batch.rows] == [1, 1]
    assert (report.rows_stale, report.stale_tokens) == (0, 1)


def test_a_batch_of_stale_tokens_changes_nothing() -> None:
    batch, report = build([sampled([1], 1.0), sampled([2], 0.0)], stale="mask")
    assert (batch.rows, report.has_signal, report.rows_stale) == ([], False, 2)


def test_a_row_of_forced_tokens_is_not_stale() -> None:
    forced = {"policy_logprobs": [-1.0], "allowed": [1]}
    _, report = build([sampled([1], 1.0, **forced), sampled([5], 0.0)], stale="mask")
    assert (report.rows_forced, report.rows_stale, report.stale_tokens) == (1, 0, 0)


def test_turn_rewards_of_stale_calls_are_on_a_trained_token() -> None:
    finished = sampled([1, 2, 3, 4], 1.0)
    emitted = rl.Span(
        rollout_id=finished.rollout.rollout_id,
        attempt_id="at-1",
        sequence_id=1,
        trace_id="0" * 32,
        span_id="1" * 16,
        name="reward",
        start_time=5.0,
        end_time=5.0,
        attributes={"agentlightning.reward.0.name": "r", "agentlightning.reward.0.value": 0.25},
    )
    final = emitted.model_copy(update={"span_id": "2" * 16, "sequence_id": 2})
    item = dataclasses.replace(finished, spans=[emitted, final])
    batch, _ = build([item, sampled([5], 0.0)], stale="mask", turn_rewards=True)
    assert [(turn.row, turn.token) for turn in batch.turn_rewards] == [(0, 5)]


def test_ages_are_of_trained_tokens_and_of_whole_trajectories() -> None:
    finished = [sampled([1, 3, 4], 1.0), sampled([5, 5], 0.0)]
    ages = build(finished, stale="mask")[1].ages
    assert (ages.staleness_mean, ages.staleness_max) == ((2 + 1 + 0 + 0) / 4, 2)
    assert (ages.trajectory_mean, ages.trajectory_max) == (2.0, 4)
    assert (ages.versions_mean, ages.versions_max) == (2.0, 3)


def test_a_synchronous_run_has_no_ages() -> None:
    finished = [sampled([1, 3], 1.0), sampled([5], 0.0)]
    batch, report = build(finished, max_staleness=0)
    assert report.ages is None
    assert sum(row.trained_tokens for row in batch.rows) == 3


VERSIONS = st.lists(st.lists(st.integers(0, VERSION), min_size=1, max_size=6), min_size=2, max_size=5)


@given(VERSIONS, st.integers(1, VERSION))
def test_no_trained_token_is_older_than_the_limit(versions: list[list[int]], limit: int) -> None:
    finished = [sampled(each, float(i)) for i, each in enumerate(versions)]
    batch, report = build(finished, stale="mask", max_staleness=limit)
    ages = [VERSION - int(v) for row in batch.rows for v in row.weight_versions[row.mask == 1]]
    expected = [VERSION - v for each in versions for v in each]
    assert ages == [age for age in expected if age <= limit]
    assert report.stale_tokens == len(expected) - len(ages)
    assert report.ages.trajectory_max == max(expected)


@given(VERSIONS)
def test_a_group_is_as_old_as_its_oldest_trained_token(versions: list[list[int]]) -> None:
    group = [sampled(each, float(i)) for i, each in enumerate(versions)]
    algorithm = rl.GRPO(model="m", max_staleness=VERSION)
    batch, _ = build_batch(group, algorithm.batch_rules(LearnerConfig(), version=VERSION))
    trained = min(int(v) for row in batch.rows for v in row.weight_versions[row.mask == 1])
    assert algorithm.batch_rules(LearnerConfig()).oldest_version(group) == trained


def test_tokens_that_are_not_trained_do_not_age_a_group() -> None:
    algorithm = rl.GRPO(model="m", off_policy_sampling="mask")
    assert algorithm.batch_rules(LearnerConfig()).oldest_version([]) is None
    group = [
        sampled([3, 4]),
        sampled([0], None),
        sampled([0], finish_reason="aborted"),
        sampled([0], sampling={"top_p": 0.5}),
        sampled([1, 3], policy_logprobs=[-1.0, -1.0], allowed=[1, 7]),
    ]
    assert algorithm.batch_rules(LearnerConfig()).oldest_version(group) == 3


def test_the_settings_need_each_other() -> None:
    for settings in ({"stale": "mask"}, {"proximal": "loglinear"}):
        with pytest.raises(ConfigError, match=r"nothing reads (stale|proximal) \(read with max_staleness\)"):
            rl.GRPO(model="m", **settings)
    assert rl.GRPO(model="m").importance_level is None
    algorithm = rl.GRPO(model="m", max_staleness=2, stale="drop", proximal="loglinear")
    assert (algorithm.importance_level, algorithm.rollout_is_threshold) == ("token", 2.0)
    assert rl.GRPO(**algorithm.arguments()) == algorithm
    assert algorithm.policy_settings().importance_level == "token"


def test_the_users_correction_wins() -> None:
    def level(**settings: Any) -> str | None:
        return rl.GRPO(model="m", max_staleness=2, **settings).importance_level

    assert level(rollout_is=None) is None
    assert level(rollout_is="sequence") == "sequence"
    assert level(bypass_mode=True) is None
    assert level(rollout_rs="token_k1", rollout_rs_threshold=2.0) == "token"


def test_only_a_chosen_correction_tolerates_a_mismatch_of_the_current_weights() -> None:
    assert not rl.GRPO(model="m", max_staleness=2).tolerates_mismatch
    assert rl.GRPO(model="m", max_staleness=2, rollout_is="token").tolerates_mismatch


@pytest.mark.parametrize(
    ("name", "settings"),
    [("GPG", {"rollout_is": None}), ("GPG", {"bypass_mode": True}), ("KLCov", {"rollout_is": None})],
)
def test_losses_without_clipping_need_a_correction(name: str, settings: dict[str, Any]) -> None:
    getattr(rl.algorithms, name)(model="m", **settings)
    getattr(rl.algorithms, name)(model="m", max_staleness=1)
    with pytest.raises(ConfigError, match=r"does not clip the ratio .* rollout_is='token'"):
        getattr(rl.algorithms, name)(model="m", max_staleness=1, **settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"rollout_is": None}, "needs rollout_is"),
        ({"bypass_mode": True}, "needs rollout_is"),
        ({"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}, "no log-probs before"),
        ({"rollout_is_batch_normalize": True}, "no log-probs before"),
        ({"kl_reward_coef": 0.1}, "no log-probs before"),
        ({"loss_mode": "gpg"}, "'gpg' has none"),
    ],
)
def test_what_cannot_be_interpolated_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"proximal='loglinear' .*{reason}.*; set proximal='recompute'"):
        rl.GRPO(model="m", max_staleness=1, proximal="loglinear", **settings)


def test_an_interpolated_policy_needs_no_pass_before_the_update() -> None:
    assert rl.GRPO(model="m", max_staleness=1, mini_batches=4).needs_old_logprobs
    assert not rl.GRPO(model="m", max_staleness=1, mini_batches=4, proximal="loglinear").needs_old_logprobs
