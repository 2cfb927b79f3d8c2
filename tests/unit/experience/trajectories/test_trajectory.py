"""Law 1: exactly the sampled tokens are trained, each response once; checked on random conversations."""

import itertools
import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_helpers import make_generation

from raylight.experience.trajectories.trajectory import (
    MAX_HEADER_TOKENS,
    Relation,
    Trajectories,
    build_trajectories,
)
from raylight.types import Generation, PlacedImage, Trajectory

TOKENS = st.integers(0, 3)
"""Few different tokens, so that prefixes also coincide by chance."""
IMAGE_TOKEN = 9
"""Token that stands for images."""


def relations(*calls: tuple[list[int], list[int]]) -> list[Relation]:
    return build_trajectories([make_generation(prompt, output) for prompt, output in calls]).relations


@st.composite
def conversations(draw: st.DrawFn) -> list[Generation]:
    """Draw calls that start a conversation, repeat a context, continue an earlier call, or fork from it."""
    calls: list[Generation] = []
    for number in range(draw(st.integers(0, 10))):
        kind = (
            draw(st.sampled_from(["fresh", "continue", "continue", "parallel", "drift"]))
            if calls
            else "fresh"
        )
        if kind == "fresh":
            prompt = draw(st.lists(TOKENS, min_size=1, max_size=4))
        elif kind == "drift":  # an earlier conversation with one changed token
            earlier = draw(st.sampled_from(calls))
            prompt = earlier.token_ids.tolist()
            prompt[draw(st.integers(0, len(prompt) - 1))] = draw(TOKENS)
        elif kind == "parallel":
            prompt = list(draw(st.sampled_from(calls)).prompt_ids.tolist())
        else:
            earlier = draw(st.sampled_from(calls))
            prompt = earlier.token_ids.tolist() + draw(st.lists(TOKENS, max_size=3))
        images = draw(placed_images(len(prompt)))
        for image in images:  # an engine has one token for all images, which it never samples
            prompt[image.start : image.stop] = [IMAGE_TOKEN] * (image.stop - image.start)
        output = draw(st.lists(TOKENS, max_size=4))
        # values that identify the token and the call
        logprobs = [-(number + place / 100) - 0.001 for place in range(len(output))]
        versions = [100 * number + place for place in range(len(output))]
        temperature = draw(st.sampled_from([1.0, 1.0, 0.5, 0.0]))
        constrained = draw(st.booleans())
        calls.append(
            replace(
                make_generation(
                    prompt,
                    output,
                    temperature=temperature,
                    logprobs=logprobs,
                    versions=versions,
                    policy_logprobs=[logprob - 1000 for logprob in logprobs] if constrained else None,
                    allowed=[draw(st.integers(0, 3)) for _ in output] if constrained else None,
                ),
                images=images,
            )
        )
    return calls


@st.composite
def placed_images(draw: st.DrawFn, tokens: int) -> tuple[PlacedImage, ...]:
    """Draw images of few kinds at the start of a prompt, so that calls often have the same ones."""
    size = 1 + (tokens > 3)
    count = draw(st.sampled_from([0, 0, 0, 1, 2])) if tokens > 2 * size else 0
    kinds = draw(st.lists(st.sampled_from("aab"), min_size=count, max_size=count))
    return tuple(PlacedImage(kind * 64, i * size, (i + 1) * size) for i, kind in enumerate(kinds))


@given(conversations())
def test_calls_with_images_are_related_as_calls_with_other_tokens(calls: list[Generation]) -> None:
    as_tokens = [replace(c, prompt_ids=c.compared_ids[: len(c.prompt_ids)], images=()) for c in calls]
    made, expected = build_trajectories(calls), build_trajectories(as_tokens)
    assert (made.relations, made.positions) == (expected.relations, expected.positions)


@given(conversations())
def test_a_row_has_the_images_of_each_of_its_calls(calls: list[Generation]) -> None:
    made = build_trajectories(calls)
    for call, position in zip(made.calls, made.positions, strict=True):
        assert made.rows[position.row].images[: len(call.images)] == call.images
    for row in made.rows:
        assert not any(row.mask[image.start : image.stop].any() for image in row.images)
        assert not any(row.observed[image.start : image.stop].any() for image in row.images)


@given(conversations(), st.data())
def test_aborted_calls_change_nothing(calls: list[Generation], data: st.DataObject) -> None:
    """The trajectories are the same as without the aborted calls."""
    cut = [data.draw(st.booleans()) for _ in calls]
    with_cut = [
        replace(call, finish_reason="aborted") if c else call for call, c in zip(calls, cut, strict=True)
    ]
    without = [call for call, c in zip(calls, cut, strict=True) if not c]
    assert build_trajectories(with_cut) == build_trajectories(without)


def trained_of(trajectory: Trajectory) -> list[tuple[int, float, int]]:
    columns = zip(
        trajectory.token_ids.tolist(),
        trajectory.mask.tolist(),
        trajectory.logprobs.tolist(),
        trajectory.weight_versions.tolist(),
        strict=True,
    )
    return [(token, logprob, version) for token, mask, logprob, version in columns if mask]


def sampled_in(calls: list[Generation]) -> list[tuple[int, float, int]]:
    """All tokens that the model had a choice of, with their log-probs under the policy and versions."""
    return [
        (token, logprob, version)
        for call in calls
        for token, logprob, version, allowed in zip(
            call.output_ids.tolist(),
            call.policy_logprobs.tolist() or call.logprobs.tolist(),
            call.weight_versions.tolist(),
            call.allowed.tolist() or [0] * len(call.output_ids),
            strict=True,
        )
        if allowed != 1
    ]


@given(conversations())
def test_every_sampled_response_is_trained_exactly_once(calls: list[Generation]) -> None:
    trained = [triple for trajectory in build_trajectories(calls).rows for triple in trained_of(trajectory)]
    assert sorted(trained) == sorted(sampled_in(calls))


@given(conversations())
def test_the_tokens_are_those_of_the_last_call(calls: list[Generation]) -> None:
    assert_tokens_of_last_calls(calls)


def assert_tokens_of_last_calls(calls: list[Generation]) -> None:
    made = build_trajectories(calls)
    sampled = [call for call in calls if call.output_ids.tolist()]
    last = {position.row: call for position, call in zip(made.positions, sampled, strict=True)}
    assert [row.token_ids.tolist() for row in made.rows] == [
        last[row].token_ids.tolist() for row in range(len(made.rows))
    ]


@given(conversations())
def test_each_response_is_contiguous_and_follows_its_prompt(calls: list[Generation]) -> None:
    made = build_trajectories(calls)
    sampled = [call for call in calls if call.output_ids.tolist()]
    for call, position in zip(sampled, made.positions, strict=True):
        row = made.rows[position.row]
        start, end = len(call.prompt_ids), len(call.prompt_ids) + len(call.output_ids)
        forced = [allowed == 1 for allowed in call.allowed.tolist() or [0] * len(call.output_ids)]
        logprobs = call.policy_logprobs.tolist() or call.logprobs.tolist()
        assert row.token_ids.tolist()[:end] == call.token_ids.tolist()
        assert row.mask.tolist()[start:end] == [0 if f else 1 for f in forced]
        assert row.logprobs.tolist()[start:end] == [
            0.0 if f else value for f, value in zip(forced, logprobs, strict=True)
        ]
        assert row.weight_versions.tolist()[start:end] == [
            -1 if f else version for f, version in zip(forced, call.weight_versions.tolist(), strict=True)
        ]


@given(conversations())
def test_observations_have_no_mask_no_logprob_no_version(calls: list[Generation]) -> None:
    for trajectory in build_trajectories(calls).rows:
        assert trajectory.mask.tolist()[0] == 0
        assert set(trajectory.mask.tolist()) <= {0, 1}
        for mask, logprob, version in zip(
            trajectory.mask.tolist(),
            trajectory.logprobs.tolist(),
            trajectory.weight_versions.tolist(),
            strict=True,
        ):
            assert mask or (logprob, version) == (0.0, -1)


@given(conversations())
def test_responses_keep_the_order_in_which_they_were_sampled(calls: list[Generation]) -> None:
    for trajectory in build_trajectories(calls).rows:
        versions = [version for _, _, version in trained_of(trajectory)]
        assert versions == sorted(versions)


@given(conversations())
def test_a_trajectory_has_one_temperature(calls: list[Generation]) -> None:
    made = build_trajectories(calls)
    sampled = [call for call in calls if call.output_ids.tolist()]
    for call, position in zip(sampled, made.positions, strict=True):
        assert made.rows[position.row].temperature == call.temperature


@given(conversations())
def test_tokens_are_counted(calls: list[Generation]) -> None:
    counts = build_trajectories(calls).tokens
    allowed = [count for call in calls for count in call.allowed.tolist()]
    assert counts.sampled == sum(len(call.output_ids) for call in calls)
    assert counts.forced == allowed.count(1)
    assert counts.constrained == sum(count > 1 for count in allowed)
    assert counts.allowed_mass == 0.0  # exp(-1000)


@given(conversations())
@settings(max_examples=30)
def test_building_does_not_modify_the_generations(calls: list[Generation]) -> None:
    before = [
        (
            list(c.prompt_ids.tolist()),
            list(c.output_ids.tolist()),
            list(c.logprobs.tolist()),
            list(c.weight_versions.tolist()),
        )
        for c in calls
    ]
    build_trajectories(calls)
    assert before == [
        (c.prompt_ids.tolist(), c.output_ids.tolist(), c.logprobs.tolist(), c.weight_versions.tolist())
        for c in calls
    ]


def test_a_conversation_of_many_turns_is_one_row() -> None:
    calls = [
        make_generation([1], [2]),
        make_generation([1, 2, 9], [3]),
        make_generation([1, 2, 9, 3], [4, 5]),
    ]
    (row,) = build_trajectories(calls).rows
    assert row.token_ids.tolist() == [1, 2, 9, 3, 4, 5]
    assert row.mask.tolist() == [0, 1, 0, 1, 1, 1]


def test_a_second_call_after_the_same_turn_has_the_history_as_context() -> None:
    calls = [make_generation([1], [2]), make_generation([1, 2, 7], [3]), make_generation([1, 2, 8], [4])]
    rows = build_trajectories(calls).rows
    assert [row.mask.tolist() for row in rows] == [[0, 1, 0, 1], [0, 0, 0, 1]]


def test_forced_tokens_are_masked_and_the_others_have_the_policys_logprobs() -> None:
    call = make_generation(
        [1, 2],
        [3, 4, 5],
        logprobs=[0.0, -0.5, -0.75],
        policy_logprobs=[-9.0, -2.5, -0.75],
        allowed=[1, 2, 0],
        versions=[6, 6, 7],
    )
    made = build_trajectories([call])
    (row,) = made.rows
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5]
    assert row.mask.tolist() == [0, 0, 0, 1, 1]
    assert row.logprobs.tolist() == [0.0, 0.0, 0.0, -2.5, -0.75]
    assert row.weight_versions.tolist() == [-1, -1, -1, 6, 7]
    assert (row.prompt_length, row.trained_tokens) == (3, 2)
    assert (made.tokens.sampled, made.tokens.forced, made.tokens.constrained) == (3, 1, 1)
    assert made.tokens.allowed_mass == pytest.approx(math.exp(-2.0))


def test_parallel_calls_are_separate_rows() -> None:
    calls = [make_generation([1, 2], [3]), make_generation([1, 2], [3]), make_generation([1, 2], [4])]
    rows = build_trajectories(calls).rows
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3], [1, 2, 3], [1, 2, 4]]


def test_a_call_extends_the_longest_matching_conversation() -> None:
    calls = [make_generation([1], [2]), make_generation([1], [2, 3]), make_generation([1, 2, 3, 9], [4])]
    assert [row.token_ids.tolist() for row in build_trajectories(calls).rows] == [[1, 2], [1, 2, 3, 9, 4]]


def test_another_temperature_starts_a_row() -> None:
    rows = build_trajectories(
        [make_generation([1], [2]), make_generation([1, 2, 9], [3], temperature=0.5)]
    ).rows
    assert [(row.temperature, row.mask.tolist()) for row in rows] == [(1.0, [0, 1]), (0.5, [0, 0, 0, 1])]


def test_calls_that_sampled_nothing_are_left_out() -> None:
    assert build_trajectories([]) == Trajectories([], [])
    assert build_trajectories([make_generation([1], [])]) == Trajectories([], [])


@given(conversations())
def test_every_call_has_a_relation_and_extensions_start_no_row(calls: list[Generation]) -> None:
    made = build_trajectories(calls)
    assert len(made.relations) == sum(bool(call.output_ids.tolist()) for call in calls)
    assert len(made.rows) == len(made.relations) - made.relations.count("extension")
    assert [place for place, relation in enumerate(made.relations) if relation == "start"] == [0][
        : len(made.relations)
    ]


@given(conversations())
def test_calls_that_share_no_token_restart(calls: list[Generation]) -> None:
    made = build_trajectories(calls)
    sampled = [call for call in calls if call.output_ids.tolist()]
    for place, (call, relation) in enumerate(zip(sampled, made.relations, strict=True)):
        earlier = [(other.token_ids.tolist())[0] for other in sampled[:place]]
        if earlier and call.prompt_ids.tolist()[0] not in earlier:
            # the first tokens of such a short prompt may count as a header
            assert relation in ("restart", "drift_header")


@given(conversations())
def test_relations_match_a_plain_comparison_of_prefixes(calls: list[Generation]) -> None:
    """An extension contains all tokens of an earlier call; a restart never does."""
    sampled = [call for call in calls if call.output_ids.tolist()]
    for place, relation in enumerate(build_trajectories(calls).relations):
        prompt = compared_prompt(sampled[place])
        totals = [call.compared_ids.tolist() for call in sampled[:place]]
        whole = any(prompt[: len(total)] == total for total in totals)
        if relation == "extension":
            assert whole
        if relation == "restart":
            assert not whole
            assert prompt not in map(compared_prompt, sampled[:place])


def compared_prompt(call: Generation) -> list[int]:
    return call.compared_ids.tolist()[: len(call.prompt_ids)]


@given(conversations(), st.randoms(use_true_random=False))
def test_the_laws_hold_in_any_order_of_the_calls(calls: list[Generation], random: object) -> None:
    random.shuffle(calls)  # type: ignore[attr-defined]
    rows = build_trajectories(calls).rows
    assert sorted(triple for row in rows for triple in trained_of(row)) == sorted(sampled_in(calls))
    assert_tokens_of_last_calls(calls)


@dataclass
class Known:
    """A tree of conversations in which all tokens differ, so that each call's relation is known."""

    calls: list[Generation]
    relations: list[Relation]


@st.composite
def known_trees(draw: st.DrawFn) -> Known:
    fresh = itertools.count(1000)
    system = [next(fresh) for _ in range(MAX_HEADER_TOKENS + 4)]
    calls: list[Generation] = []
    known: list[Relation] = []
    open_: list[Generation] = []

    def some(least: int, most: int) -> list[int]:
        return [next(fresh) for _ in range(draw(st.integers(least, most)))]

    kinds: list[Relation] = ["extension", "fork", "drift_ending", "drift_response", "drift_header", "restart"]
    for _ in range(draw(st.integers(1, 12))):
        kind = draw(st.sampled_from(kinds)) if calls else "start"
        past = draw(st.sampled_from(calls)) if calls else None
        if kind == "extension" and past not in open_:
            kind = "fork"
        elif kind == "fork" and past in open_:
            kind = "extension"
        prompt = system + some(MAX_HEADER_TOKENS, MAX_HEADER_TOKENS + 4)
        if past is not None and kind in ("extension", "fork"):
            prompt = past.token_ids.tolist() + some(5, 8)
        elif past is not None and kind == "drift_ending":
            prompt = past.token_ids.tolist()[:-1] + some(5, 8)
        elif past is not None and kind == "drift_response":
            kept = draw(st.integers(0, len(past.output_ids) - 2))
            prompt = past.prompt_ids.tolist() + past.output_ids.tolist()[:kept] + some(5, 8)
        elif past is not None and kind == "drift_header":
            skipped = draw(st.integers(0, len(past.output_ids) - 2))
            prompt = (
                past.prompt_ids.tolist()[: -draw(st.integers(1, 4))]
                + past.output_ids.tolist()[skipped:]
                + some(5, 8)
            )
        call = make_generation(prompt, some(3, 6))
        if kind == "extension":
            open_.remove(past)
        open_.append(call)
        calls.append(call)
        known.append(kind)
    return Known(calls, known)


@given(known_trees())
@settings(max_examples=5 * settings.default.max_examples)
def test_the_relations_of_a_known_tree(tree: Known) -> None:
    assert build_trajectories(tree.calls).relations == tree.relations


def test_parallel_samples_after_the_first_are_forks() -> None:
    assert relations(([1, 2], [3, 9]), ([1, 2], [3, 9]), ([1, 2], [4, 9])) == ["start", "fork", "fork"]


def test_a_retry_of_an_earlier_turn_is_a_fork() -> None:
    assert relations(([1], [2, 9]), ([1, 2, 9, 3], [4, 9]), ([1], [5, 9])) == ["start", "extension", "fork"]


def test_a_retried_partial_response_is_a_fork() -> None:
    assert relations(([1], [2, 3, 4, 9]), ([1, 2, 3], [5, 9])) == ["start", "fork"]


def test_another_question_after_the_same_turn_is_a_fork_even_with_a_shared_prefix() -> None:
    assert relations(([1], [2, 9]), ([1, 2, 9, 50, 51], [4, 9]), ([1, 2, 9, 50, 52], [5, 9])) == [
        "start",
        "extension",
        "fork",
    ]


def test_the_same_prompt_at_another_temperature_is_a_fork() -> None:
    calls = [make_generation([1], [2]), make_generation([1, 2, 3], [4], temperature=0.5)]
    assert build_trajectories(calls).relations == ["start", "fork"]


@pytest.mark.parametrize(
    ("rendered", "relation"),
    [
        (
            [30, 31, 32, 9, 50],
            "extension",
        ),  # the end token belongs to the response, as most templates have it
        ([30, 31, 32, 50], "drift_ending"),  # the end token is not rendered
        ([30, 31, 32, 8, 50], "drift_ending"),  # another end token
        ([30, 33, 9, 50], "drift_response"),  # another tokenization
        ([31, 32, 9, 50], "drift_response"),  # without its beginning, such as its reasoning
        ([50], "drift_response"),  # not rendered at all
    ],
)
def test_the_rendering_of_a_response_in_the_next_prompt_decides_the_drift(
    rendered: list[int], relation: Relation
) -> None:
    assert relations(([1, 2], [30, 31, 32, 9]), ([1, 2, *rendered], [60, 9])) == ["start", relation]


@pytest.mark.parametrize("output", [[30, 9], [30]])
def test_a_response_that_is_not_rendered_is_response_drift(output: list[int]) -> None:
    assert relations(([1, 2], output), ([1, 2, 40, 9, 50], [60, 9])) == ["start", "drift_response"]


@pytest.mark.parametrize("rendered", [[30, 31, 32, 9, 50], [32, 9, 50], [30, 31, 32, 50]])
def test_a_header_rendered_before_new_responses_only_is_drift(rendered: list[int]) -> None:
    """An example is the empty thought of a model asked not to think; the last case omits reasoning too."""
    think = [70, 71, 72]
    assert relations(([1, 2, *think], [30, 31, 32, 9]), ([1, 2, *rendered, *think], [60, 9])) == [
        "start",
        "drift_header",
    ]


def test_a_user_message_equal_to_the_response_is_no_header_drift() -> None:
    """The end token of the message lies between, so the prompt did not diverge in a header."""
    header = [9, 70]
    assert relations(([1, 2, *header], [30, 9]), ([1, 30, *header], [31, 9])) == ["start", "restart"]


def test_a_summarized_history_restarts() -> None:
    calls = [([1, 2], [3, 9]), ([1, 2, 3, 9, 4], [5, 9]), ([1, 6], [7, 9]), ([1, 6, 7, 9, 8], [5, 9])]
    assert relations(*calls) == ["start", "extension", "restart", "extension"]


def test_drift_starts_a_row_with_context() -> None:
    made = build_trajectories([make_generation([1], [2, 9]), make_generation([1, 2, 50], [4, 9])])
    assert [(row.token_ids.tolist(), row.mask.tolist()) for row in made.rows] == [
        ([1, 2, 9], [0, 1, 1]),
        ([1, 2, 50, 4, 9], [0, 0, 0, 1, 1]),
    ]


def test_a_second_question_after_a_drift_is_drift_again() -> None:
    """It shares the most tokens with the first question, but its history is rendered differently too."""
    calls = [([1, 2], [30, 31, 32, 9]), ([1, 2, 32, 9, 50], [60, 9]), ([1, 2, 32, 9, 51], [61, 9])]
    assert relations(*calls) == ["start", "drift_response", "drift_response"]


def plain_rows(calls: list[Generation]) -> list[list[Generation]]:
    """Reference: a call extends the longest conversation that its prompt begins with, by comparing lists."""
    rows: list[list[Generation]] = []
    for call in (call for call in calls if call.output_ids.tolist()):
        lengths = {}
        for place, row in enumerate(rows):
            tokens = row[-1].compared_ids.tolist()
            if compared_prompt(call)[: len(tokens)] == tokens and call.temperature == row[-1].temperature:
                lengths[place] = len(tokens)
        if lengths:
            rows[max(lengths, key=lambda place: lengths[place])].append(call)
        else:
            rows.append([call])
    return rows


@given(conversations())
@settings(max_examples=5 * settings.default.max_examples)
def test_rows_match_a_plain_comparison(calls: list[Generation]) -> None:
    expected = [row[-1].token_ids.tolist() for row in plain_rows(calls)]
    made = build_trajectories(calls).rows
    assert sorted(row.token_ids.tolist() for row in made) == sorted(expected)


def test_a_conversation_of_many_long_calls_is_one_row() -> None:
    """The calls are longer than the chunks in which tokens are compared."""
    calls, context = [], list(range(1, 700))
    for turn in range(20):
        output = [10_000 * turn + token for token in range(1000, 1300)]
        calls.append(make_generation(list(context), output))
        context += [*output, turn]
    made = build_trajectories(calls)
    assert made.relations == ["start"] + ["extension"] * 19
    assert [len(row.token_ids) for row in made.rows] == [len(context) - 1]
    changed = make_generation([*context[:5000], -5, *context[5001:]], [7])
    assert build_trajectories([*calls, changed]).relations[-1] == "drift_response"


@given(conversations())
def test_each_position_is_the_last_token_of_its_call(calls: list[Generation]) -> None:
    built = build_trajectories(calls)
    kept = [call for call in calls if call.output_ids.tolist() and call.finish_reason != "aborted"]
    assert len(built.positions) == len(built.relations) == len(kept)
    for call, position in zip(kept, built.positions, strict=True):
        row = built.rows[position.row]
        assert row.token_ids.tolist()[: position.last_token + 1] == call.token_ids.tolist()
        assert row.mask.tolist()[position.last_token] == (
            0 if call.allowed.tolist() and call.allowed.tolist()[-1] == 1 else 1
        )
        assert position.call_id == call.key.call_id
