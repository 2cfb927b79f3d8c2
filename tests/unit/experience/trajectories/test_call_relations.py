"""Relations of calls to earlier calls, from their tokens and from the notes of serving."""

from dataclasses import replace
from typing import get_args

import pytest
from unit_helpers import make_generation, make_key

from raylight.experience.trajectories.call_relations import (
    COUNTED,
    TOKEN_DRIFTS,
    find_drift,
    report_relations,
)
from raylight.experience.trajectories.trajectory import Relation, build_trajectories
from raylight.types import CONTINUED, DRIFTS, ContinuedKind, DriftKind, Generation, HistoryNote

FIRST = make_generation([1, 2], [3, 9])


def with_note(call: Generation, kind: str, **fields: object) -> Generation:
    return replace(call, history=HistoryNote(kind, f"reason of {kind}", **fields))  # type: ignore[arg-type]


def test_every_kind_has_a_meaning_and_a_counter() -> None:
    assert set(CONTINUED) == set(get_args(ContinuedKind))
    assert set(DRIFTS) == set(get_args(DriftKind))
    named = {"extension", "fork", "restart", "start", *TOKEN_DRIFTS}
    assert named == set(get_args(Relation))
    assert len(COUNTED) == len(set(COUNTED))


@pytest.mark.parametrize("kind", ["white_space", "suffix", "merged", "calls_as_text"])
def test_rewritten_continuations_are_extensions(kind: str) -> None:
    calls = [FIRST, with_note(make_generation([1, 2, 3, 9, 4], [5]), kind)]
    report = report_relations([build_trajectories(calls)])
    assert report.counts == {"extensions": 1, f"extensions_{kind}": 1}
    assert (report.rows_per_rollout, report.max_rows, report.drifts) == (1.0, 1, {})


def test_the_note_names_the_drift_that_the_tokens_show() -> None:
    edited = with_note(
        make_generation([1, 2, 8], [5], key=make_key(call_id="c2")), "answer_edited", message=1, offset=3
    )
    report = report_relations([build_trajectories([FIRST, edited]), build_trajectories([FIRST])])
    assert report.counts == {"drifts": 1, "drifts_answer_edited": 1}
    assert (report.calls, report.rows_per_rollout, report.max_rows) == (3, 1.5, 2)
    drift = report.drifts["answer_edited"]
    assert (drift.call.call_id, drift.reason, drift.place) == (
        "c2",
        "reason of answer_edited",
        "message 1, character 3",
    )


def test_a_drift_of_messages_whose_tokens_continue_is_none() -> None:
    calls = [FIRST, with_note(make_generation([1, 2, 3, 9, 4], [5]), "template")]
    assert report_relations([build_trajectories(calls)]).counts == {"extensions": 1}


@pytest.mark.parametrize("kind", ["unsupported", "token_in_off"])
def test_a_request_that_was_not_compared_drifts_if_its_tokens_do(kind: str) -> None:
    note = HistoryNote(kind, "reason")  # type: ignore[arg-type]
    for relation in ("restart", "fork", "start", "extension"):
        assert find_drift(FIRST.key, relation, note) is None
    drift = find_drift(FIRST.key, "drift_response", note)
    assert drift.kind == kind


def test_without_a_note_the_tokens_name_the_drift() -> None:
    for note in (None, HistoryNote("new"), HistoryNote("continued")):
        drift = find_drift(FIRST.key, "drift_header", note)
        assert (drift.kind, drift.place) == ("header", "")


def test_no_rollouts_have_no_rows() -> None:
    report = report_relations([])
    assert (report.calls, report.rows_per_rollout, report.max_rows) == (0, 0.0, 0)
