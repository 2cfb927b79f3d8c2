"""Rules of a batch: zero-variance groups, long rows, turn rewards, baselines."""

import dataclasses
import json
import math
from operator import attrgetter
from typing import Any

import pytest
from unit_helpers import make_finished, make_generation, make_key

from raylight.errors import EmptyTraceError, GreedyError, RowTooLongError
from raylight.experience.batches.batch import BatchReport, BatchRules, TrainBatch, build_batch
from raylight.experience.trajectories.reward_rules import RewardRules, TurnReward
from raylight.experience.trajectories.staleness import StaleMask
from raylight.semconv import ANNOTATION, GRADE_SPAN_ID, GRADE_TURNS, reward_attributes
from raylight.trainer.loops.batch_metrics import describe
from raylight.types import GREEDY, Failure, FinishedRollout, Generation, RolloutConfig, Span


def build(
    finished: list[FinishedRollout],
    failure_reward: float | None = None,
    turn_rewards: bool = False,
    **rules: Any,
) -> tuple[TrainBatch, BatchReport]:
    rewards = RewardRules(failure_reward=failure_reward, turn_rewards=turn_rewards)
    return build_batch(finished, BatchRules(rewards=rewards, **rules))


def rewards(*values: float, group: str = "g") -> list[FinishedRollout]:
    return [make_finished(value, group=group) for value in values]


def with_calls(
    reward: float,
    calls: list[tuple[list[int], list[int], float]],
    emitted: list[tuple[float, float]] = (),
    **more: Any,
):
    """A rollout with calls (prompt, output, start; each takes a second) and emitted rewards (value, time)."""
    item = make_finished(reward, **more)
    generations = [
        make_generation(prompt, output, key=make_key(item.rollout.rollout_id), start=start)
        for prompt, output, start in calls
    ]
    spans = [
        Span.from_attributes(
            name=ANNOTATION,
            attributes=dict(reward_attributes({"primary": value})),
            start_time=at,
            end_time=at,
        )
        for value, at in emitted
    ]
    return dataclasses.replace(item, generations=generations, spans=spans)


# zero-variance groups


def test_zero_variance_groups_are_kept_or_dropped_and_counted() -> None:
    finished = rewards(1.0, 1.0, group="a") + rewards(1.0, 0.0, group="b")
    kept, report = build(finished)
    assert (kept.rewards, report.groups_without_signal, report.zero_variance) == ([1.0, 1.0, 1.0, 0.0], 1, 0)
    dropped, report = build(finished, zero_variance_groups="drop")
    assert (dropped.rewards, dropped.groups, dropped.owners) == ([1.0, 0.0], ["b", "b"], [0, 1])
    assert (
        report.groups,
        report.groups_without_signal,
        report.zero_variance,
        report.trained,
        report.relations.calls,
    ) == (
        2,
        1,
        2,
        2,
        2,
    )
    assert describe(finished, report, 1.0)["train/equal"] == 2
    assert build(rewards(1.0, 1.0), zero_variance_groups="drop")[1].has_signal is False


@pytest.mark.parametrize(
    ("baseline_kind", "values", "expected"),
    [
        ("group", (1.0, 1.0), False),
        ("group", (1.0, 0.0), True),
        ("batch", (1.0, 1.0), False),
        ("batch", (1.0, 0.0), True),
        ("none", (1.0, 1.0), True),
        ("none", (), False),
    ],
)
def test_a_batch_has_signal_if_a_reward_differs_from_its_baseline(
    baseline_kind: Any, values: tuple[float, ...], expected: bool
) -> None:
    assert build(rewards(*values), baseline_kind=baseline_kind)[1].has_signal is expected


def test_a_batch_baseline_compares_rollouts_of_different_tasks() -> None:
    finished = rewards(1.0, group="a") + rewards(0.0, group="b")
    assert build(finished, baseline_kind="batch")[1].has_signal
    assert not build(finished, baseline_kind="group")[1].has_signal


# long rows


def long_and_short() -> list[FinishedRollout]:
    """The first has a row of six tokens, and one of three; the second one of three."""
    long = with_calls(1.0, [([1, 2], [3, 4, 5, 6], 0.0), ([7, 8], [9], 2.0)])
    return [long, with_calls(0.0, [([1, 2], [3], 0.0)])]


def truncated(item: FinishedRollout, treatment: str, budget: str | None = "max_turns") -> FinishedRollout:
    """Mark a rollout as truncated."""
    attempt = item.rollout.attempt.model_copy(update={"metadata": {"truncated": budget}})
    config = RolloutConfig(max_turns=1, truncated=treatment)
    return dataclasses.replace(
        item, rollout=item.rollout.model_copy(update={"attempt": attempt, "config": config})
    )


def test_a_masked_truncation_counts_in_its_group_and_trains_no_token() -> None:
    first, second, third = rewards(1.0, 0.0, 0.5)
    whole = build([first, second, third])[0]
    batch, report = build([first, truncated(second, "mask"), truncated(third, "mask", None)])
    assert (batch.rewards, batch.groups, batch.lengths) == (whole.rewards, whole.groups, whole.lengths)
    assert batch.owners == [0, 2]
    assert (report.trained, report.rows_forced, report.stale_tokens, report.has_signal) == (3, 0, 0, True)
    assert build([first, truncated(second, "score"), third])[0].owners == [0, 1, 2]
    unscored = truncated(dataclasses.replace(second, reward=None), "mask")
    assert build([first, unscored, third])[1].unscored == 1


def test_truncated_rollouts_are_counted_by_budget() -> None:
    items = rewards(1.0, 0.0, 0.5, 0.25)
    finished = [
        truncated(items[0], "score"),
        truncated(items[1], "score"),
        truncated(items[2], "score", "max_seconds"),
        truncated(items[3], "score", None),
    ]
    metrics = describe(finished, build(finished)[1], seconds=1.0)
    metrics.pop("train/truncated_answers")  # answers of the engine, which no budget of a rollout ended
    assert {name: n for name, n in metrics.items() if name.startswith("train/truncated")} == {
        "train/truncated": 3,
        "train/truncated_max_turns": 2,
        "train/truncated_max_tokens": 0,
        "train/truncated_max_seconds": 1,
    }
    plain = rewards(1.0, 0.0)
    assert "train/truncated" not in describe(plain, build(plain)[1], seconds=1.0)


def test_a_long_row_raises_and_names_the_settings() -> None:
    with pytest.raises(RowTooLongError, match=r"6 tokens.*takes 5.*max_row_tokens.*max_model_len.*long_rows"):
        build(long_and_short(), row_limit=5)
    assert len(build(long_and_short(), row_limit=6)[0].rows) == 3


def test_a_long_row_is_dropped_but_its_rollout_counts() -> None:
    batch, report = build(long_and_short(), row_limit=5, long_rows="drop")
    assert ([len(row.token_ids) for row in batch.rows], batch.owners, batch.rewards) == (
        [3, 3],
        [0, 1],
        [1.0, 0.0],
    )
    assert (report.rows_dropped, report.rows_truncated, report.trained) == (1, 0, 2)
    metrics = describe(long_and_short(), report, 1.0)
    assert (metrics["trace/rows_dropped"], metrics["trace/rows_truncated"]) == (1, 0)
    assert not build(long_and_short(), row_limit=2, long_rows="drop")[1].has_signal  # nothing is left


def test_a_long_row_is_truncated() -> None:
    batch, report = build(long_and_short(), row_limit=4, long_rows="truncate")
    row = batch.rows[0]
    assert (row.token_ids.tolist(), row.mask.tolist(), row.weight_versions.tolist()) == (
        [1, 2, 3, 4],
        [0, 0, 1, 1],
        [-1, -1, 0, 0],
    )
    assert len(row.logprobs) == 4
    assert (report.rows_dropped, report.rows_truncated) == (0, 1)
    assert (
        build(long_and_short(), row_limit=2, long_rows="truncate")[1].rows_dropped == 3
    )  # only prompts are left


# turn rewards


def conversation(*emitted: tuple[float, float], reward: float = 9.0, **more: Any) -> FinishedRollout:
    """A rollout with calls that end at 1, 4 and 7; the second extends the first, the third does not."""
    calls = [([1, 2], [3], 0.0), ([1, 2, 3, 4], [5, 6], 3.0), ([7], [8], 6.0)]
    return with_calls(reward, calls, list(emitted), **more)


def test_a_turn_reward_belongs_to_the_last_call_before_it() -> None:
    finished = [conversation((0.5, 0.0), (1.0, 1.0), (2.0, 5.0), (3.0, 7.5), (9.0, 8.0))]
    assert build(finished)[0].turn_rewards == []
    batch, _ = build([*rewards(0.0), *finished], turn_rewards=True)
    assert batch.rewards == [0.0, 9.0]
    assert batch.turn_rewards == [
        TurnReward(0.5, 1, 1, 2),
        TurnReward(1.0, 1, 1, 2),
        TurnReward(2.0, 1, 1, 5),
        TurnReward(3.0, 1, 2, 1),
    ]
    assert [batch.rows[turn.row].mask.tolist()[turn.token] for turn in batch.turn_rewards] == [1, 1, 1, 1]


def test_the_turn_reward_of_a_dropped_row_has_no_row() -> None:
    batch, _ = build([conversation((2.0, 5.0), (9.0, 8.0))], turn_rewards=True, row_limit=3, long_rows="drop")
    assert batch.turn_rewards == [TurnReward(2.0, 0, None, 5)]


def test_all_rewards_of_a_failed_rollout_are_turn_rewards() -> None:
    failure = Failure(kind="agent", error="E: e")
    item = conversation((2.0, 5.0), failure=failure)
    assert [turn.value for turn in build([item], failure_reward=-1.0, turn_rewards=True)[0].turn_rewards] == [
        2.0
    ]


def test_turn_rewards_count_in_the_variance_of_a_group() -> None:
    same = [conversation((1.0, 2.0), (9.0, 8.0)), conversation((1.0, 5.0), (9.0, 8.0))]
    other = [conversation((2.0, 2.0), (9.0, 8.0)), conversation((1.0, 5.0), (9.0, 8.0))]
    assert not build(same, turn_rewards=True)[1].has_signal
    assert build(other, turn_rewards=True)[1].has_signal
    assert not build(other)[1].has_signal


def test_turn_rewards_count_in_dynamic_sampling_if_trained() -> None:
    def emitted(*values: float) -> FinishedRollout:
        return with_calls(
            values[-1], [([1], [2], 0.0)], [(value, float(i)) for i, value in enumerate(values)], group="g"
        )

    one, other, same = emitted(0.1, 0.2, 0.7), emitted(0.3, 0.7), emitted(0.2, 0.1, 0.7)
    for trained, pair, differ in (
        (True, [one, emitted(0.7)], True),
        (True, [one, other], False),
        (True, [one, same], False),
        (False, [one, emitted(0.7)], False),
    ):
        assert BatchRules(rewards=RewardRules(turn_rewards=trained)).is_informative(pair) == differ


# baselines


def greedy(reward: float | None, group: str, temperature: float = 0.0) -> FinishedRollout:
    item = make_finished(reward, group=group)
    rollout = item.rollout.model_copy(update={"metadata": {GREEDY: True}})
    return dataclasses.replace(
        item, rollout=rollout, generations=[make_generation([1], [2], temperature=temperature)]
    )


def test_the_greedy_rollout_is_the_baseline_of_its_group() -> None:
    finished = [*rewards(1.0, group="a"), greedy(0.25, "a"), greedy(0.5, "b"), greedy(None, "c")]
    assert RewardRules().greedy_baselines(finished, attrgetter("generations")) == {"a": 0.25, "b": 0.5}


def test_a_sampled_greedy_rollout_raises() -> None:
    with pytest.raises(GreedyError, match=r"temperature 0.7.*llm\.sampling_parameters"):
        RewardRules().greedy_baselines([greedy(1.0, "a", temperature=0.7)], attrgetter("generations"))


def test_a_group_without_baseline_is_left_out() -> None:
    finished = rewards(1.0, group="a") + rewards(0.0, group="b")
    batch, report = build([*finished, greedy(1.0, "a")], baseline_kind="greedy")
    assert (batch.rewards, batch.baselines, report.without_baseline, report.has_signal) == (
        [1.0],
        [1.0],
        1,
        False,
    )
    assert build([*finished, greedy(0.5, "a")], baseline_kind="greedy")[1].has_signal


# tokens without a choice


def schema_bound(reward: float, allowed: list[int], **more: Any) -> FinishedRollout:
    item = make_finished(reward, calls=0, **more)
    n = len(allowed)
    call = make_generation(
        [1, 2],
        [3] * n,
        key=make_key(item.rollout.rollout_id),
        logprobs=[0.0 if count == 1 else -0.5 for count in allowed],
        policy_logprobs=[-1.5] * n,
        allowed=allowed,
    )
    return dataclasses.replace(item, generations=[call])


def test_a_rollout_of_forced_tokens_counts_in_its_group_but_has_no_row() -> None:
    finished = [schema_bound(1.0, [1, 1]), schema_bound(0.0, [1, 2, 0])]
    batch, report = build(finished)
    assert (batch.owners, batch.rewards, batch.rows[0].mask.tolist()) == ([1], [1.0, 0.0], [0, 0, 0, 1, 1])
    assert (report.trained, report.rows_forced, report.has_signal) == (2, 1, True)
    metrics = describe(finished, report, 1.0)
    assert metrics["constrained/tokens"] == 1
    assert metrics["constrained/fraction"] == pytest.approx(1 / 5)
    assert metrics["constrained/forced_tokens"] == 3
    assert metrics["constrained/forced_fraction"] == pytest.approx(3 / 5)
    assert metrics["constrained/forced_rows"] == 1
    assert metrics["constrained/allowed_probability"] == pytest.approx(math.exp(-1.0))


@pytest.mark.parametrize("kind", ["group", "batch", "greedy", "none"])
def test_without_any_choice_there_is_no_signal(kind: Any) -> None:
    finished = [schema_bound(1.0, [1, 1]), schema_bound(0.0, [1, 1])]
    batch, report = build([*finished, greedy(0.5, "g")] if kind == "greedy" else finished, baseline_kind=kind)
    assert (batch.rows, report.has_signal, report.rows_forced) == ([], False, 2)
    assert "constrained/allowed_probability" not in describe(finished, report, 1.0)


def test_rows_of_groups_without_signal_are_no_signal() -> None:
    forced = [schema_bound(reward, [1], group="forced") for reward in (0.0, 1.0)]
    equal = [schema_bound(0.5, [2], group="equal") for _ in range(2)]
    batch, report = build([*forced, *equal])
    assert (len(batch.rows), report.has_signal) == (2, False)


def test_the_turn_reward_of_a_forced_row_belongs_to_the_last_choice_before() -> None:
    item = conversation((0.5, 1.0), (3.0, 7.5), (9.0, 8.0))
    *calls, last = item.generations
    forced = dataclasses.replace(last, policy_logprobs=[-1.0], allowed=[1])
    batch, report = build([dataclasses.replace(item, generations=[*calls, forced])], turn_rewards=True)
    assert (len(batch.rows), report.rows_forced) == (1, 1)
    assert batch.turn_rewards == [TurnReward(0.5, 0, 0, 2), TurnReward(3.0, 0, 0, 5)]


@pytest.mark.parametrize("emitted", [True, False])
@pytest.mark.parametrize("stale", [True, False])
def test_the_reward_of_a_turn_without_trained_tokens_stays_with_its_rollout(
    emitted: bool, stale: bool
) -> None:
    """The second of three calls, each in its own row, was sampled by old weights, or is all forced."""
    item = with_calls(0.0, [([1], [2], 0.0), ([3], [4], 2.0), ([5], [6], 4.0)])
    first, second, third = item.generations
    lost = {"weight_versions": [0]} if stale else {"policy_logprobs": [-1.0], "allowed": [1]}
    fresh = {"weight_versions": [2]} if stale else {}
    calls = [
        dataclasses.replace(first, **fresh),
        dataclasses.replace(second, **lost),
        dataclasses.replace(third, **fresh),
    ]
    spans = with_calls(0.0, [], [(0.5, 1.5), (1.0, 3.5), (0.25, 5.5), (0.0, 9.0)]).spans
    if not emitted:
        grades = dict(zip((call.key.call_id for call in calls), (0.5, 1.0, 0.25), strict=True))
        attributes = {GRADE_TURNS: json.dumps(grades)}
        graded = Span.from_attributes(name=ANNOTATION, attributes=attributes, span_id=GRADE_SPAN_ID)
        spans = [*spans[-1:], graded]
    item = dataclasses.replace(item, generations=calls, spans=spans)
    batch, _ = build([item], turn_rewards=True, stale=StaleMask(2, 1) if stale else None)
    assert [(turn.value, turn.row) for turn in batch.turn_rewards] == [(0.5, 0), (1.0, 0), (0.25, 1)]
    assert batch.lengths == [3]


def test_the_turn_reward_of_a_rollout_of_forced_tokens_has_no_row() -> None:
    item = conversation((0.5, 1.0), (9.0, 8.0))
    calls = [
        dataclasses.replace(call, policy_logprobs=[-1.0] * n, allowed=[1] * n)
        for call in item.generations
        if (n := len(call.output_ids))
    ]
    batch, _ = build([dataclasses.replace(item, generations=calls)], turn_rewards=True)
    assert batch.turn_rewards == [TurnReward(0.5, 0, None, 2)]
    assert batch.lengths == [sum(len(call.output_ids) for call in calls)]


def _auxiliary(call: Generation) -> Generation:
    return dataclasses.replace(call, sampling={**call.sampling, "auxiliary": "haiku"})


@pytest.mark.parametrize("trains", [False, True])
def test_auxiliary_calls_are_trained_only_if_asked(trains: bool) -> None:
    own, title = make_generation(prompt=[1], output=[2, 3]), make_generation(prompt=[7], output=[8])
    item = dataclasses.replace(make_finished(1.0), generations=[own, _auxiliary(title)])
    batch, report = build_batch([item], BatchRules(train_auxiliary_calls=trains))
    assert len(batch.rows) == 1 + trains
    assert (report.auxiliary_calls, report.auxiliary_tokens) == ((0, 0) if trains else (1, 1))


def test_a_rollout_of_auxiliary_calls_alone_names_the_setting() -> None:
    item = dataclasses.replace(
        make_finished(1.0), generations=[_auxiliary(make_generation(prompt=[1], output=[2]))]
    )
    with pytest.raises(EmptyTraceError, match="train_auxiliary_calls=True"):
        build_batch([item], BatchRules())


def test_the_longest_trajectory_has_most_trained_tokens() -> None:
    calls = [
        make_generation(prompt=[1, 1, 1, 1, 1], output=[2]),
        make_generation(prompt=[5], output=[6, 7]),
        make_generation(prompt=[9], output=[8]),
    ]
    item = dataclasses.replace(make_finished(1.0), generations=calls)
    batch, report = build_batch([item], BatchRules(trajectory_selection="longest"))
    assert [row.token_ids.tolist() for row in batch.rows] == [[5, 6, 7]]
    assert (report.rows_unselected, report.unselected_tokens, report.trained_tokens) == (2, 2, 2)
    whole, all_of_them = build_batch([item], BatchRules())
    assert (len(whole.rows), all_of_them.rows_unselected) == (3, 0)
