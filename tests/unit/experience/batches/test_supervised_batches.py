"""Token rows of supervised examples, their length limit, and the batches of the steps."""

from dataclasses import replace

import numpy as np
import pytest

from raylight.errors import ConfigError, RowTooLongError
from raylight.experience.batches.demonstrations import DemonstrationRow
from raylight.experience.batches.supervised_batches import (
    BatchSchedule,
    Example,
    LearnedRow,
    LengthLimit,
    SupervisedData,
    build_supervised_batch,
    split_examples,
)
from raylight.types import PlacedImage, Trajectory


def row(prompt: int, answer: int) -> LearnedRow:
    return LearnedRow(
        np.arange(prompt + answer, dtype=np.int32), np.array([0] * prompt + [1] * answer, np.int8)
    )


def test_a_demonstration_learns_its_answers():
    found = LearnedRow.from_demonstration(DemonstrationRow([5, 6, 7, 8, 9], [(1, 2), (3, 5)]))
    assert found.mask.tolist() == [0, 1, 0, 1, 1]
    trajectory = found.to_trajectory("d")
    assert trajectory.token_ids.tolist() == [5, 6, 7, 8, 9]
    assert (trajectory.trained_tokens, trajectory.prompt_length, trajectory.temperature) == (3, 1, 1.0)


def test_a_recorded_rollout_with_images_is_refused():
    row = Trajectory("ro-1", [1, 2, 3], [0, 0, 1], [0.0] * 3, [-1] * 3, images=(PlacedImage("a" * 64, 0, 2),))
    with pytest.raises(ConfigError, match=r"rollout ro-1 has images.*choose a run without images"):
        LearnedRow.from_trajectory(row)


def test_the_answers_of_a_pair_follow_each_other_in_the_batch():
    pair = Example("p", ((row(2, 1), row(3, 1)), (row(2, 2),)))
    batch = build_supervised_batch([pair, replace(pair, margin=0.5)])
    assert batch.rewards == [0.0, 0.0, 0.5, 0.0]
    prints = [SupervisedData([replace(pair, margin=margin)]).fingerprint() for margin in (0.0, 0.5)]
    assert prints[0] != prints[1]
    assert batch.groups == ["0", "0", "1", "1"]
    assert batch.owners == [0, 0, 1, 2, 2, 3]
    assert [len(each.token_ids) for each in batch.rows] == [3, 4, 4, 3, 4, 4]


@pytest.mark.parametrize(
    ("rule", "kept", "counts"),
    [("drop", [3], (2, 0)), ("truncate", [3, 4], (1, 1))],
)
def test_long_examples_are_dropped_or_truncated_and_counted(rule, kept, counts):
    limit = LengthLimit(4, rule)
    found = [limit.apply(Example("e", ((each,),))) for each in (row(2, 1), row(2, 9), row(4, 1))]
    assert [each.tokens for each in found if each is not None] == kept
    assert (limit.dropped, limit.truncated) == counts


def test_a_long_example_is_an_error_that_names_it():
    with pytest.raises(RowTooLongError, match=r"example 3 of d\.jsonl has a row of 5 tokens.*max_row_tokens"):
        LengthLimit(4, "error").apply(Example("example 3 of d.jsonl", ((row(2, 3),),)))


def test_examples_are_split_by_number_and_by_tokens():
    tokens = [4, 4, 9, 1, 1, 1]
    assert list(split_examples(range(6), tokens, 4, None)) == [[0, 1, 2, 3], [4, 5]]
    assert list(split_examples(range(6), tokens, 4, 8)) == [[0, 1], [2], [3, 4, 5]]
    assert list(split_examples(range(6), tokens, 2, 8)) == [[0, 1], [2], [3, 4], [5]]


def test_every_epoch_has_each_example_once_in_another_order():
    schedule = BatchSchedule([3] * 10, 4, None, 3, None, seed=7)
    assert schedule.steps == 9
    epochs = [[i for step in range(first, first + 3) for i in schedule.batch(step)] for first in (1, 4, 7)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert schedule.epochs_after(9) == 3
    assert schedule.epochs_after(4) == pytest.approx(4 / 3)


@pytest.mark.parametrize(("batch_tokens", "n_steps"), [(None, 7), (9, 11), (9, None)])
def test_a_step_has_the_same_examples_whenever_it_is_taken(batch_tokens, n_steps):
    make = lambda: BatchSchedule([1, 5, 3, 9, 2], 2, batch_tokens, 2, n_steps, seed=3)  # noqa: E731
    schedule, resumed = make(), make()
    taken = {step: schedule.batch(step) for step in range(1, schedule.steps + 1)}
    assert n_steps in (None, schedule.steps)
    assert all(resumed.batch(step) == taken[step] for step in reversed(taken))


def test_other_tokens_have_another_fingerprint():
    one, other = Example("a", ((row(2, 1),),)), Example("a", ((row(1, 2),),))
    prints = [SupervisedData([each]).fingerprint() for each in (one, other, one)]
    assert prints[0] == prints[2] != prints[1]
