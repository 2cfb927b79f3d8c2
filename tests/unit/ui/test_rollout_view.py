"""Values of a rollout that the learners recorded."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from raylight.experience.batches.token_records import TokenRecords
from raylight.learner.tokens.rows import make_probe_row, record_row
from raylight.ui.rollout_view import advantages_of


@pytest.mark.parametrize(
    ("mask", "mean"), [([1, 1, 0, 1, 1], 0.5), ([0, 0, 0, 1, 1], 1.0), ([1, 1, 0, 0, 0], 0.0), ([0] * 5, 0.0)]
)
def test_the_mean_advantage_counts_trained_tokens_of_advantage_0(
    tmp_path: Path, mask: list[int], mean: float
) -> None:
    advantages = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0])
    row = replace(make_probe_row(range(6)), mask=torch.tensor(mask), advantages=advantages)
    records = TokenRecords(tmp_path)
    records.write(1, [record_row(row, bypass_mode=False)], ["a"])
    assert advantages_of(records, 1, ["a", "b"]) == {"a": mean, "b": None}
