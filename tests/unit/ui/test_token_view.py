"""Tokens of a rollout: rows, kinds, records of the learners, pages and summaries."""

from dataclasses import replace

import numpy as np
import pytest
from unit_helpers import make_generation, make_key

from raylight.errors import QueryError
from raylight.experience.batches.token_records import RecordedRow
from raylight.experience.trajectories.row_rules import RowRules
from raylight.experience.trajectories.staleness import StaleMask
from raylight.types import FinishedRollout, Rollout, RolloutConfig
from raylight.ui import token_view
from raylight.ui.token_view import OBSERVATION, PROMPT, SAMPLED, token_rows


class Letters:
    """Tokenizer in which token i is the i-th letter."""

    def id_to_token(self, id: int) -> str | None:
        return "\u2581x" if id == 0 else chr(96 + id)

    def decode(self, ids, *, skip_special_tokens: bool = True) -> str:
        return "".join(chr(96 + token) for token in ids)


def finished(*calls) -> FinishedRollout:
    rollout = Rollout(rollout_id="ro-1", input=1, start_time=0.0, status="succeeded", config=RolloutConfig())
    return FinishedRollout(rollout, 1.0, list(calls))


def conversation() -> FinishedRollout:
    first = make_generation([1, 2], [3, 4], key=make_key(call_id="a"), logprobs=[-1.0, -2.0], versions=[5, 6])
    second = make_generation([1, 2, 3, 4, 9], [7], key=make_key(call_id="b"), start=2.0, versions=[7])
    return finished(first, second)


def test_a_conversation_is_one_row() -> None:
    (row,) = token_rows(conversation())
    assert row.ids.tolist() == [1, 2, 3, 4, 9, 7]
    assert row.kind.tolist() == [PROMPT, PROMPT, SAMPLED, SAMPLED, OBSERVATION, SAMPLED]
    assert row.call.tolist() == [0, 0, 1, 1, 0, 2]
    assert row.trained.tolist() == [0, 0, 1, 1, 0, 1]
    page = token_view.page(row, 1, 4, Letters())
    assert page["text"] == ["b", "c", "d", "i"]
    assert page["logprob"] == [None, -1.0, -2.0, None]
    assert page["version"] == [None, 5, 6, None]
    assert page["advantage"] == [None] * 4


def test_records_of_learners_are_at_their_tokens() -> None:
    record = RecordedRow(2, np.array([-1.5, -2.5, 9, -3.5], np.float32), np.array([1, 1, 0, 1], np.float32))
    (row,) = token_rows(conversation(), [record])
    page = token_view.page(row, 0, 10, None)
    assert page["learner_logprob"] == [None, None, -1.5, -2.5, None, -3.5]
    assert page["advantage"] == [None, None, 1.0, 1.0, None, 1.0]
    assert page["text"] == [None] * 6
    summary = token_view.summary(row, 3)
    assert summary["difference"] == [None, -0.5, -2.5]


def test_a_record_of_another_row_is_left_out() -> None:
    (row,) = token_rows(conversation(), [RecordedRow(3, np.zeros(1, np.float32), np.zeros(1, np.float32))])
    assert np.isnan(row.advantage).all()


def test_what_the_learners_did_not_record_was_not_trained() -> None:
    (left_out,) = token_rows(conversation(), [])
    assert not left_out.trained.any()
    truncated = RecordedRow(2, np.array([-1.5, -2.5], np.float32), np.array([1, 1], np.float32))
    (row,) = token_rows(conversation(), [truncated])
    assert row.trained.tolist() == [0, 0, 1, 1, 0, 0]


def test_calls_that_are_not_trained_have_rows_of_their_own() -> None:
    item = conversation()
    aborted = make_generation([1], [2], key=make_key(call_id="c"), start=3.0)
    object.__setattr__(aborted, "finish_reason", "aborted")
    item.generations.append(aborted)
    rows = token_rows(item)
    assert [row.ids.tolist() for row in rows] == [[1, 2, 3, 4, 9, 7], [1, 2]]
    assert rows[1].trained.tolist() == [0, 0]
    assert rows[1].kind.tolist() == [PROMPT, SAMPLED]


def test_the_rules_of_the_run_choose_the_trained_rows() -> None:
    short = make_generation([9], [8], key=make_key(call_id="c"), start=3.0)
    title = make_generation([5], [6, 6, 6, 6, 6], key=make_key(call_id="d"), start=4.0)
    title = replace(title, sampling={**title.sampling, "auxiliary": "haiku"})
    item = finished(*conversation().generations, short, title)
    assert [int(row.trained.sum()) for row in token_rows(item)] == [3, 1, 0]
    rules = RowRules(train_auxiliary_calls=True, trajectory_selection="longest")
    assert [int(row.trained.sum()) for row in token_rows(item, None, rules)] == [0, 0, 5]
    validation = replace(item, rollout=item.rollout.model_copy(update={"mode": "val"}))
    assert not any(row.trained.any() for row in token_rows(validation))


def test_tokens_that_were_too_old_are_not_trained() -> None:
    record = RecordedRow(3, np.array([-2.5, 9, -3.5], np.float32), np.array([1, 0, 1], np.float32))
    (row,) = token_rows(conversation(), [record], stale=StaleMask(version=7, limit=1))
    assert row.trained.tolist() == [0, 0, 0, 1, 0, 1]
    assert row.advantage[[3, 5]].tolist() == [1.0, 1.0]


def test_forced_tokens_are_not_trained() -> None:
    call = make_generation([1], [2, 3], policy_logprobs=[-0.5, -0.6], allowed=[1, 0])
    (row,) = token_rows(finished(call))
    assert row.trained.tolist() == [0, 0, 1]


def test_a_space_of_sentencepiece_stays() -> None:
    row = token_rows(finished(make_generation([0], [1])))[0]
    assert token_view.page(row, 0, 2, Letters())["text"] == [" x", "a"]


def test_a_summary_has_at_most_a_part_for_each_token() -> None:
    (row,) = token_rows(conversation())
    assert len(token_view.summary(row, 512)["kind"]) == 6


def test_a_million_tokens_are_summarised_and_paged() -> None:
    call = make_generation([1] * 500_000, [2] * 500_000)
    (row,) = token_rows(finished(call))
    assert len(token_view.summary(row, 512)["logprob"]) == 512
    assert len(token_view.page(row, 999_000, 4096, None)["id"]) == 1000


@pytest.mark.parametrize(("offset", "limit"), [(-1, 1), (0, 0), (0, 10**9)])
def test_pages_out_of_range_are_errors(offset: int, limit: int) -> None:
    with pytest.raises(QueryError):
        token_view.page(token_rows(conversation())[0], offset, limit, None)
