"""Batches from finished rollouts: excluded rollouts are counted, and an empty batch raises."""

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import make_finished, make_generation, make_key

from raylight.errors import EmptyTraceError
from raylight.experience.batches.batch import BatchReport, BatchRules, TrainBatch, build_batch
from raylight.experience.trajectories.reward_rules import RewardRules
from raylight.types import TRAINABLE_AGENTS, Failure, FinishedRollout, Generation, Span

AGENT = Failure(kind="agent", error="ValueError: no")
LOST = Failure(kind="infrastructure", error="RunnerLost: died")


def build(
    finished: list[FinishedRollout], failure_reward: float | None, **rules: Any
) -> tuple[TrainBatch, BatchReport]:
    return build_batch(finished, BatchRules(rewards=RewardRules(failure_reward), **rules))


FAILED = {
    kind: make_finished(failure=Failure(kind=kind, error="E: e")) for kind in ("agent", "reward", "timeout")
}
LOST_ROLLOUT = make_finished(failure=LOST)
LEFT_OUT: dict[str, tuple[FinishedRollout, float | None, list[float], tuple[int, int, int, int]]] = {
    "failed agent": (FAILED["agent"], None, [], (1, 1, 0, 0)),
    **{f"{kind}, with a reward": (item, -1.0, [-1.0], (2, 0, 0, 0)) for kind, item in FAILED.items()},
    "failed agent, with a reward of 0": (FAILED["agent"], 0.0, [0.0], (2, 0, 0, 0)),
    **{f"infrastructure, {value}": (LOST_ROLLOUT, value, [], (1, 1, 0, 0)) for value in (None, 0.0, -1.0)},
    "cancelled": (make_finished(status="cancelled"), 0.0, [], (1, 1, 0, 0)),
    "no reward, which is not 0": (make_finished(None), 0.0, [], (1, 0, 1, 0)),
    "no calls": (make_finished(0.0, calls=0), None, [], (1, 0, 0, 1)),
}
"""Rollout, failure reward, reward in a batch, and the counts: trained, failed, unscored, empty."""


@pytest.mark.parametrize(("other", "failure_reward", "reward", "counts"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_a_batch_leaves_out_is_counted(
    other: FinishedRollout, failure_reward: float | None, reward: list[float], counts: tuple[int, ...]
) -> None:
    batch, report = build([make_finished(1.0), other], failure_reward)
    assert batch.rewards == [1.0, *reward]
    assert (report.trained, report.failed, report.unscored, report.empty) == counts


def test_a_batch_without_calls_raises_with_advice() -> None:
    with pytest.raises(EmptyTraceError, match=r"2 rollouts.*llm\.endpoint"):
        build([make_finished(1.0, calls=0), make_finished(0.0, calls=0), make_finished(failure=LOST)], None)


def test_a_batch_of_failures_is_empty() -> None:
    batch, report = build([make_finished(failure=LOST)], None)
    assert (batch.rows, report.failed, report.has_signal) == ([], 1, False)


def test_a_rollout_of_several_rows_counts_once() -> None:
    batch, report = build(
        [make_finished(1.0, calls=3), make_finished(0.0, calls=1), make_finished(0.5, calls=2)], None
    )
    assert batch.rewards == [1.0, 0.0, 0.5]
    assert batch.owners == [0, 0, 0, 1, 2, 2]
    assert report.trained == 3
    assert len(batch.groups) == 3


def test_rows_belong_to_the_right_rollout_when_some_are_left_out() -> None:
    finished = [
        make_finished(failure=LOST),
        make_finished(1.0, rollout_id="x"),
        make_finished(None),
        make_finished(0.0, rollout_id="y"),
    ]
    batch, _ = build(finished, None)
    assert [
        (row.rollout_id, batch.rewards[owner]) for row, owner in zip(batch.rows, batch.owners, strict=True)
    ] == [
        ("x", 1.0),
        ("y", 0.0),
    ]


def test_equal_rewards_give_no_signal() -> None:
    same = [make_finished(1.0, group="a"), make_finished(1.0, group="a")]
    different = [make_finished(1.0, group="b"), make_finished(0.0, group="b")]
    _, report = build(same + different, None)
    assert (report.groups, report.groups_without_signal, report.has_signal) == (2, 1, True)
    assert not build(same, None)[1].has_signal


def test_a_rollout_without_group_is_a_group_of_its_own() -> None:
    batch, report = build([make_finished(1.0, group=None), make_finished(0.0, group=None)], None)
    assert len(set(batch.groups)) == 2
    assert not report.has_signal


KINDS = st.sampled_from(["good", "agent", "lost", "unscored", "empty"])


@given(st.lists(KINDS, max_size=12), st.sampled_from([None, 0.0, -1.0]))
def test_every_rollout_is_counted_exactly_once(kinds: list[str], failure_reward: float | None) -> None:
    make = {
        "good": lambda: make_finished(1.0),
        "agent": lambda: make_finished(failure=AGENT),
        "empty": lambda: make_finished(1.0, calls=0),
        "lost": lambda: make_finished(failure=LOST),
        "unscored": lambda: make_finished(None),
    }
    finished = [make[kind]() for kind in ["good", *kinds]]
    batch, report = build(finished, failure_reward)
    assert report.trained + report.failed + report.unscored + report.empty == len(finished)
    assert report.trained == len(batch.rewards) == len(batch.groups) == len(set(batch.owners))


def test_a_single_rollout_of_a_group_is_left_out() -> None:
    alone = [make_finished(1.0, group="a"), make_finished(failure=AGENT, group="a")]
    together = [make_finished(1.0, group="b"), make_finished(0.0, group="b")]
    batch, report = build(alone + together, None, min_group=2)
    assert batch.groups == ["b", "b"]
    assert batch.owners == [0, 1]
    assert (report.trained, report.without_baseline, report.groups) == (2, 1, 1)
    assert build(alone, None, min_group=2)[0].rows == []


def finished_with(
    *generations: Generation, reward: float = 1.0, marked: tuple[str, ...] = ()
) -> FinishedRollout:
    base = make_finished(reward, calls=0)
    rollout = base.rollout.model_copy(update={"metadata": {TRAINABLE_AGENTS: list(marked)} if marked else {}})
    return dataclasses.replace(base, rollout=rollout, generations=list(generations))


def of_agent(agent: str | None, prompt: list[int], output: list[int]) -> Generation:
    return dataclasses.replace(make_generation(prompt, output), agent=agent)


def test_relations_of_calls_are_counted() -> None:
    first = finished_with(
        make_generation([1, 2], [3, 9]),
        make_generation([1, 2, 3, 9, 4], [5, 9]),  # extension
        make_generation([1, 2], [6, 9]),  # fork
        make_generation([1, 2, 3, 7], [5, 9]),  # ending
        make_generation([1, 2, 8], [5, 9]),  # response
        make_generation([7], [8, 9]),  # restart
    )
    second = finished_with(
        make_generation([1, 2, 70], [3, 9]), make_generation([1, 2, 3, 9, 70], [4, 9]), reward=0.0
    )
    batch, report = build([first, second], None)
    relations = report.relations
    assert relations.calls == 8
    assert relations.counts == {
        "extensions": 1,
        "forks": 1,
        "restarts": 1,
        "drifts": 3,
        "drifts_ending": 1,
        "drifts_response": 1,
        "drifts_header": 1,
    }
    assert len(batch.rows) == relations.calls - relations.counts["extensions"]
    assert (relations.rows_per_rollout, relations.max_rows) == (3.5, 5)


def test_calls_of_excluded_rollouts_are_not_counted() -> None:
    _, report = build([make_finished(1.0), make_finished(failure=LOST), make_finished(None)], None)
    assert report.relations.calls == 1


def test_only_the_calls_of_trained_agents_are_trained() -> None:
    item = finished_with(
        of_agent("writer", [1], [2]), of_agent("critic", [1, 2], [3]), of_agent(None, [5], [6])
    )
    batch, report = build([item], None, trained_agents="^writ")
    assert [row.token_ids.tolist() for row in batch.rows] == [[1, 2]]
    assert (report.relations.calls, report.other_agents, report.empty) == (1, 2, 0)
    assert build([item], None)[1].relations.calls == 3


def aborted(prompt: list[int], output: list[int]) -> Generation:
    return dataclasses.replace(make_generation(prompt, output), finish_reason="aborted")


def test_aborted_calls_are_counted_and_not_trained() -> None:
    item = finished_with(
        make_generation([1], [2]), aborted([1], [2]), aborted([1, 2], []), make_generation([1, 2], [3])
    )
    batch, report = build([item], None)
    assert [row.token_ids.tolist() for row in batch.rows] == [[1, 2, 3]]
    assert (report.relations.calls, report.relations.counts) == (2, {"extensions": 1})
    assert report.aborted == 2


def test_a_rollout_of_aborted_calls_is_empty_and_a_batch_of_them_raises() -> None:
    _, report = build([make_finished(1.0), finished_with(aborted([1], [2]))], None)
    assert (report.trained, report.empty, report.aborted) == (1, 1, 1)
    with pytest.raises(EmptyTraceError, match=r"1 rollouts were scored, but all 2 calls .* were cut off"):
        build([finished_with(aborted([1], [2]), aborted([3], [4]))], None)


def test_an_agent_marked_by_the_rollout_is_trained() -> None:
    item = finished_with(of_agent("writer", [1], [2]), of_agent("critic", [3], [4]), marked=("critic",))
    batch, report = build([item], None)
    assert [row.token_ids.tolist() for row in batch.rows] == [[3, 4]]
    assert report.other_agents == 1


def test_a_rollout_without_trained_agents_is_empty() -> None:
    items = [finished_with(of_agent("writer", [1], [2])), finished_with(of_agent("critic", [1], [2]))]
    batch, report = build(items, None, trained_agents="writer")
    assert (report.trained, report.empty, report.other_agents) == (1, 1, 1)
    assert len(batch.rows) == 1


def test_a_batch_without_trained_agents_raises_with_advice() -> None:
    with pytest.raises(
        EmptyTraceError, match=r"all their 2 calls.*trained_agents \('coder'\).*mark_agent_as_trainable"
    ):
        build(
            [finished_with(of_agent("writer", [1], [2]), of_agent(None, [3], [4]))],
            None,
            trained_agents="coder",
        )


def test_the_agent_of_a_call_is_read_from_spans() -> None:
    call = make_generation([1], [2], key=make_key(call_id="c7"))
    attributes = {"gen_ai.response.id": "chatcmpl-c7", "gen_ai.agent.name": "writer"}
    spans = [Span(trace_id="t", span_id="s", name="openai.chat", attributes=attributes)]
    item = dataclasses.replace(finished_with(call, make_generation([3], [4])), spans=spans)
    assert [row.token_ids.tolist() for row in build([item], None, trained_agents="writer")[0].rows] == [
        [1, 2]
    ]
