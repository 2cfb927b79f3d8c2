"""Law 1: what is trained is exactly what was sampled, each response once. Checked on random trees of conversations."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from unit_helpers import make_generation

from raylight.traces.trajectory import build_trajectories
from raylight.types import Generation, Trajectory

TOKENS = st.integers(0, 3)
"""Few different tokens, so that prefixes coincide by chance as well."""


@st.composite
def conversations(draw: st.DrawFn) -> list[Generation]:
    """Calls that each start afresh, repeat a context, continue an earlier call, or fork from it."""
    calls: list[Generation] = []
    for number in range(draw(st.integers(0, 10))):
        kind = draw(st.sampled_from(["fresh", "continue", "continue", "parallel"])) if calls else "fresh"
        if kind == "fresh":
            prompt = draw(st.lists(TOKENS, min_size=1, max_size=4))
        elif kind == "parallel":
            prompt = list(draw(st.sampled_from(calls)).prompt_ids)
        else:
            earlier = draw(st.sampled_from(calls))
            prompt = earlier.prompt_ids + earlier.output_ids + draw(st.lists(TOKENS, max_size=3))
        output = draw(st.lists(TOKENS, max_size=4))
        # values that tell which token of which call they belong to
        logprobs = [-(number + place / 100) - 0.001 for place in range(len(output))]
        versions = [100 * number + place for place in range(len(output))]
        temperature = draw(st.sampled_from([1.0, 1.0, 0.5, 0.0]))
        calls.append(make_generation(prompt, output, temperature=temperature, logprobs=logprobs, versions=versions))
    return calls


def trained_of(trajectory: Trajectory) -> list[tuple[int, float, int]]:
    columns = zip(trajectory.token_ids, trajectory.mask, trajectory.logprobs, trajectory.weight_versions, strict=True)
    return [(token, logprob, version) for token, mask, logprob, version in columns if mask]


def sampled_in(calls: list[Generation]) -> list[tuple[int, float, int]]:
    return [triple for call in calls for triple in zip(call.output_ids, call.logprobs, call.weight_versions, strict=True)]


def owner(calls: list[Generation], trajectory: Trajectory, last: bool) -> Generation:
    """The call of a trajectory's last (or first) trained token; versions are unique."""
    version = trained_of(trajectory)[-1 if last else 0][2]
    return next(call for call in calls if version in call.weight_versions)


@given(conversations())
def test_every_sampled_response_is_trained_exactly_once(calls: list[Generation]) -> None:
    trained = [triple for trajectory in build_trajectories(calls) for triple in trained_of(trajectory)]
    assert sorted(trained) == sorted(sampled_in(calls))


@given(conversations())
def test_the_tokens_are_those_of_the_last_call(calls: list[Generation]) -> None:
    for trajectory in build_trajectories(calls):
        last = owner(calls, trajectory, last=True)
        assert trajectory.token_ids == last.prompt_ids + last.output_ids


@given(conversations())
def test_each_response_lies_where_it_was_sampled_and_in_one_piece(calls: list[Generation]) -> None:
    for trajectory in build_trajectories(calls):
        for call in calls:
            if call.output_ids and call.weight_versions[0] in trajectory.weight_versions:
                start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.output_ids)
                assert trajectory.weight_versions[start:end] == call.weight_versions
                assert trajectory.logprobs[start:end] == call.logprobs
                assert trajectory.mask[start:end] == [1] * len(call.output_ids)
                assert trajectory.token_ids[:end] == call.prompt_ids + call.output_ids


@given(conversations())
def test_what_was_not_sampled_has_no_mask_no_logprob_no_version(calls: list[Generation]) -> None:
    for trajectory in build_trajectories(calls):
        assert trajectory.mask[0] == 0
        assert set(trajectory.mask) == {0, 1}
        for mask, logprob, version in zip(trajectory.mask, trajectory.logprobs, trajectory.weight_versions, strict=True):
            assert mask or (logprob, version) == (0.0, -1)


@given(conversations())
def test_responses_keep_the_order_in_which_they_were_sampled(calls: list[Generation]) -> None:
    for trajectory in build_trajectories(calls):
        versions = [version for _, _, version in trained_of(trajectory)]
        assert versions == sorted(versions)


@given(conversations())
def test_a_trajectory_has_one_temperature(calls: list[Generation]) -> None:
    for trajectory in build_trajectories(calls):
        inside = [c for c in calls if c.output_ids and c.weight_versions[0] in trajectory.weight_versions]
        assert {call.temperature for call in inside} == {trajectory.temperature}


@given(conversations())
@settings(max_examples=30)
def test_building_leaves_the_generations_alone(calls: list[Generation]) -> None:
    before = [(list(c.prompt_ids), list(c.output_ids), list(c.logprobs), list(c.weight_versions)) for c in calls]
    build_trajectories(calls)
    assert before == [(c.prompt_ids, c.output_ids, c.logprobs, c.weight_versions) for c in calls]


def test_a_conversation_of_many_turns_is_one_row() -> None:
    calls = [make_generation([1], [2]), make_generation([1, 2, 9], [3]), make_generation([1, 2, 9, 3], [4, 5])]
    (row,) = build_trajectories(calls)
    assert row.token_ids == [1, 2, 9, 3, 4, 5]
    assert row.mask == [0, 1, 0, 1, 1, 1]


def test_of_two_calls_that_continue_the_same_turn_the_second_has_the_past_as_context() -> None:
    rows = build_trajectories([make_generation([1], [2]), make_generation([1, 2, 7], [3]), make_generation([1, 2, 8], [4])])
    assert [row.mask for row in rows] == [[0, 1, 0, 1], [0, 0, 0, 1]]


def test_parallel_calls_are_rows_of_their_own() -> None:
    rows = build_trajectories([make_generation([1, 2], [3]), make_generation([1, 2], [3]), make_generation([1, 2], [4])])
    assert [row.token_ids for row in rows] == [[1, 2, 3], [1, 2, 3], [1, 2, 4]]


def test_a_call_continues_the_longest_conversation_that_fits() -> None:
    calls = [make_generation([1], [2]), make_generation([1], [2, 3]), make_generation([1, 2, 3, 9], [4])]
    assert [row.token_ids for row in build_trajectories(calls)] == [[1, 2], [1, 2, 3, 9, 4]]


def test_another_temperature_begins_a_row_of_its_own() -> None:
    rows = build_trajectories([make_generation([1], [2]), make_generation([1, 2, 9], [3], temperature=0.5)])
    assert [(row.temperature, row.mask) for row in rows] == [(1.0, [0, 1]), (0.5, [0, 0, 0, 1])]


def test_calls_that_sampled_nothing_are_left_out() -> None:
    assert build_trajectories([]) == []
    assert build_trajectories([make_generation([1], [])]) == []
