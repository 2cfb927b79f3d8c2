"""Relations of calls to earlier calls, and the origins of their prompts."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from unit_helpers import make_generation, make_key, make_rollout

from raylight.experience.trajectories.call_lineage import CallLineage, PromptSegment, trace_lineage
from raylight.types import TRAINABLE_AGENTS, FinishedRollout, Generation, HistoryNote


def lineage_of(*calls: Generation, marked: tuple[str, ...] = ()) -> list[CallLineage]:
    rollout = make_rollout(metadata={TRAINABLE_AGENTS: list(marked)} if marked else {})
    return trace_lineage(FinishedRollout(rollout, 1.0, list(calls)))


def test_a_conversation_of_three_calls() -> None:
    note = HistoryNote("suffix", "text was appended", 1, 4, "", "</code>")
    calls = [
        make_generation([1, 2], [3, 4]),
        replace(make_generation([1, 2, 3, 4, 5], [6]), history=note),
        make_generation([1, 2, 3, 4, 5, 6, 7, 8], [9]),
    ]
    first, second, third = lineage_of(*calls)
    assert (first.kind, first.related, first.segments) == ("start", None, [PromptSegment("new", None, 2)])
    assert (second.kind, second.related, second.shared) == ("continued_suffix", 1, 4)
    assert (second.reason, second.place) == (
        "text was appended",
        "message 1, character 4: was '', sent '</code>'",
    )
    assert (third.kind, third.number, third.row) == ("continued", 3, 1)
    assert third.segments == [
        PromptSegment("prompt", 1, 2),
        PromptSegment("output", 1, 2),
        PromptSegment("prompt", 2, 1),
        PromptSegment("output", 2, 1),
        PromptSegment("new", None, 2),
    ]


def test_a_drift_leaves_the_call_that_it_shares_most_tokens_with() -> None:
    calls = [
        make_generation([1, 2], [3, 4]),
        make_generation([1, 2, 3, 4, 5], [6, 7]),
        make_generation([1, 2, 3, 4, 5, 6, 8], [9]),
    ]
    *_, third = lineage_of(*calls)
    assert (third.kind, third.related, third.shared, third.row) == ("drift_ending", 2, 6, 2)
    assert third.segments[-2:] == [PromptSegment("output", 2, 1), PromptSegment("new", None, 1)]


def test_calls_that_are_not_trained() -> None:
    calls = [
        replace(make_generation([1], [2]), agent="solver"),
        replace(make_generation([1, 2], [3]), agent="critic"),
        replace(make_generation([1, 2, 4], [5]), agent="solver", finish_reason="aborted"),
    ]
    solver, critic, cut = lineage_of(*calls, marked=("solver",))
    assert (solver.kind, solver.row) == ("start", 1)
    assert (critic.kind, critic.row, critic.reason) == ("not_trained", None, "its agent is not trained")
    assert (cut.kind, cut.row, cut.reason) == ("not_trained", None, "its response was cut off")


tokens = st.lists(st.integers(1, 3), max_size=6)


@given(st.lists(st.tuples(st.integers(0, 5), tokens, tokens), min_size=1, max_size=6))
def test_the_segments_are_the_prompt(drawn: list[tuple[int, list[int], list[int]]]) -> None:
    calls: list[Generation] = []
    for base, added, output in drawn:
        before = calls[base] if base < len(calls) else make_generation([1], [])
        prompt = before.token_ids.tolist() + added
        calls.append(make_generation(prompt, output, key=make_key(call_id=f"c{len(calls)}")))
    for call, lineage in zip(calls, lineage_of(*calls), strict=True):
        assert sum(segment.tokens for segment in lineage.segments) == len(call.prompt_ids)
        position = 0
        for origin, number, count in lineage.segments:
            piece = call.prompt_ids.tolist()[position : position + count]
            position += count
            if number is not None:
                source = calls[number - 1]
                start = position - count
                assert piece == (source.token_ids.tolist())[start:position]
                assert (start >= len(source.prompt_ids)) == (origin == "output")
