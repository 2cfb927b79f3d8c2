"""Rows of a rollout that are trained, as `trace` and the pages show them: the same as in a batch."""

from dataclasses import replace

import numpy as np
import pytest
from unit_helpers import make_finished, make_generation, make_key

from raylight.experience.batches.batch import BatchRules, build_batch
from raylight.experience.trajectories.call_lineage import trace_lineage
from raylight.experience.trajectories.row_rules import RowRules, learned_rows, trained_rows
from raylight.types import FinishedRollout, RolloutConfig


def finished() -> FinishedRollout:
    """Return a rollout with a long answer, an auxiliary call, a call of another agent and a short answer."""
    solver = make_generation([1, 2], [3, 4, 5], key=make_key(call_id="a"))
    title = make_generation([7], [8], key=make_key(call_id="b"))
    title = replace(title, sampling={**title.sampling, "auxiliary": "haiku"})
    critic = replace(make_generation([9], [10], key=make_key(call_id="c")), agent="critic")
    short = make_generation([11], [12, 13], key=make_key(call_id="d"))
    calls = [
        replace(solver, agent="solver"),
        replace(title, agent="solver"),
        critic,
        replace(short, agent="solver"),
    ]
    return replace(make_finished(1.0), generations=calls)


RULES = [
    RowRules(),
    RowRules("solver"),
    RowRules(train_auxiliary_calls=True),
    RowRules(trajectory_selection="longest"),
    RowRules("critic|solver", True, "longest"),
]


@pytest.mark.parametrize("rules", RULES)
def test_the_rows_are_those_of_a_batch(rules: RowRules) -> None:
    names = ("trained_agents", "train_auxiliary_calls", "trajectory_selection")
    batch, _ = build_batch([finished()], BatchRules(**{name: getattr(rules, name) for name in names}))
    trajectories, chosen = trained_rows(finished(), rules)
    assert [trajectories.rows[i].token_ids.tolist() for i in chosen] == [
        row.token_ids.tolist() for row in batch.rows
    ]
    trained = {lineage.row for lineage in trace_lineage(finished(), rules) if lineage.trained}
    assert trained == {index + 1 for index in chosen}


def test_a_call_that_is_not_trained_has_its_reason() -> None:
    first, title, critic, short = trace_lineage(
        finished(), RowRules("solver", trajectory_selection="longest")
    )
    assert (first.trained, first.reason) == (True, "")
    assert (title.trained, title.row) == (False, None)
    assert "'haiku'" in title.reason
    assert (critic.trained, critic.reason) == (False, "its agent is not trained")
    assert (short.trained, short.row) == (False, 2)
    assert short.reason == "its row is not trained: trajectory_selection='longest' trains row 1"
    assert short.to_json()["trained"] is False


def test_a_call_that_was_sampled_off_policy_is_masked() -> None:
    call = make_generation([1], [2])
    item = replace(make_finished(1.0), generations=[replace(call, sampling={"top_p": 0.5})])
    (lineage,) = trace_lineage(item)
    assert (lineage.kind, lineage.trained) == ("start", False)
    assert lineage.reason == "it was not sampled from the policy's own distribution: top_p"
    assert not np.any(trained_rows(item, RowRules()).trajectories.rows[0].mask)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({}, RowRules()),
        ({"algorithm": None, "run": {"trained_agents": 3}}, RowRules()),
        (
            {
                "run": {"trained_agents": "solver"},
                "algorithm": {"train_auxiliary_calls": True, "trajectory_selection": "longest"},
            },
            RowRules("solver", True, "longest"),
        ),
        (
            {
                "algorithm": {"name": "VERL", "config": {"trajectory_selection": "all"}},
                "run": {"algorithm": {"name": "VERL", "trajectory_selection": "longest"}},
            },
            RowRules(trajectory_selection="longest"),
        ),
    ],
)
def test_the_rules_are_in_the_configuration(content: dict[str, object], expected: RowRules) -> None:
    assert RowRules.from_config(content) == expected


@pytest.mark.parametrize("rules", RULES)
def test_demonstrations_are_the_rows_of_a_batch(rules: RowRules) -> None:
    trajectories, chosen = trained_rows(finished(), rules)
    learned = learned_rows(finished(), rules)
    assert [row.token_ids.tolist() for row in learned] == [
        trajectories.rows[i].token_ids.tolist() for i in chosen
    ]


def test_demonstrations_include_calls_that_were_not_sampled_from_the_policys_own_distribution() -> None:
    call = make_generation([1, 2], [3, 4, 5], key=make_key(call_id="a"))
    greedy = replace(call, sampling={**call.sampling, "temperature": 0.0, "top_k": 1})
    (row,) = learned_rows(replace(make_finished(1.0), generations=[greedy]), RowRules())
    assert row.mask.tolist() == [0, 0, 1, 1, 1]


@pytest.mark.parametrize(("treatment", "count"), [("mask", 0), ("score", 1)])
def test_a_masked_rollout_is_no_demonstration(treatment: str, count: int) -> None:
    """A budget cut it off, and the run trained none of its tokens."""
    item = make_finished(1.0)
    attempt = item.rollout.attempt.model_copy(update={"metadata": {"truncated": "max_turns"}})
    config = RolloutConfig(max_turns=1, truncated=treatment)
    rollout = item.rollout.model_copy(update={"attempt": attempt, "config": config})
    assert len(learned_rows(replace(item, rollout=rollout), RowRules())) == count
