"""Records of trained tokens: written for each step, read for some rollouts."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from raylight.experience.batches.token_records import TOKENS_FOLDER, RowRecord, TokenRecords


def row(index: int, start: int, *advantages: float) -> RowRecord:
    values = np.array(advantages, np.float32)
    return RowRecord(index, start, -values, values)


def test_rows_come_back_by_rollout_and_in_order(tmp_path: Path) -> None:
    records = TokenRecords(tmp_path)
    records.write(3, [row(2, 5, 1.0), row(0, 7, 2.0, 3.0), row(1, 6, 4.0)], ["a", "b", "a"])
    found = records.read(3, ["a", "c"])
    assert [(item.start, item.advantages.tolist()) for item in found["a"]] == [(7, [2.0, 3.0]), (5, [1.0])]
    assert found["a"][0].logprobs.tolist() == [-2.0, -3.0]
    assert found["c"] == []


def test_a_row_that_is_on_several_ranks_is_recorded_once(tmp_path: Path) -> None:
    records = TokenRecords(tmp_path)
    records.write(1, [row(0, 1, 1.0), row(0, 1, 1.0)], ["a"])
    assert len(records.read(1, ["a"])["a"]) == 1


def test_zeros_of_earlier_versions_are_of_untrained_tokens(tmp_path: Path) -> None:
    records = TokenRecords(tmp_path)
    records.write(1, [row(0, 1, 1.0, 0.0)], ["a"])
    assert records.read(1, ["a"])["a"][0].advantages.tolist() == [1.0, 0.0]
    (file,) = (tmp_path / TOKENS_FOLDER).iterdir()
    save_file(load_file(file), file, {"rollouts": '["a"]'})
    np.testing.assert_equal(records.read(1, ["a"])["a"][0].advantages, [1.0, np.nan])


def test_a_step_without_records_has_none(tmp_path: Path) -> None:
    records = TokenRecords(tmp_path)
    records.write(1, [], [])
    assert records.read(1, ["a"]) == {"a": []}
    assert not (tmp_path / TOKENS_FOLDER).exists()


def test_a_step_that_is_taken_again_removes_those_after_it(tmp_path: Path) -> None:
    records = TokenRecords(tmp_path)
    for step in (1, 2, 3, 10):
        records.write(step, [row(0, 1, float(step))], ["a"])
    records.write(2, [row(0, 1, 20.0)], ["a"])
    assert sorted(file.name for file in (tmp_path / TOKENS_FOLDER).iterdir()) == [
        "step-1.safetensors",
        "step-2.safetensors",
    ]
    assert records.read(2, ["a"])["a"][0].advantages.tolist() == [20.0]


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / TOKENS_FOLDER).write_text("a file")
    with pytest.raises(OSError, match=TOKENS_FOLDER):
        TokenRecords(tmp_path).write(1, [row(0, 1, 1.0)], ["a"])
