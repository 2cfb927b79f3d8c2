"""Rows with known log ratios of learner to engine, and one rank that corrects its shard of them."""

import math
from typing import Any

import torch

from raylight.errors import MismatchError
from raylight.experience.settings.correction_settings import CorrectionSettings

APART = [
    [0.0, math.log(2), 9.0],  # log ratio of each token; the third token is an observation
    [math.log(3), -math.log(4)],
    [math.log(1.1), -math.log(1.2), 0.0, math.log(1.5)],
    [-1.5],
    [2.0, 2.0],
]
MASKS = [[1, 1, 0], [1, 1], [1, 1, 1, 1], [1], [1, 1]]
VERSIONS = [[3, 3, -1], [3, 3], [3, 3, 3, 3], [2], [2, 2]]
CASES = {
    "token": {"rollout_is": "token", "rollout_is_threshold": 1.3},
    "sequence": {"rollout_is": "sequence"},
    "icepop": {"rollout_is": "token", "rollout_is_threshold": "0.5_2.5"},
    "normalised": {"rollout_is": "token", "rollout_is_batch_normalize": True},
    "normalised rows": {"rollout_is": "sequence", "rollout_is_batch_normalize": True},
    "geometric": {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.7_1.2"},
    "both": {
        "rollout_is": "token",
        "rollout_rs": "token_k1,seq_max_k2",
        "rollout_rs_threshold": "0.5_2.0,1.0",
    },
    "one row": {"rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.55_0.75"},
    "nothing": {
        "rollout_rs": "token_k3",
        "rollout_rs_threshold": 1e-9,
        "rollout_is": "token",
        "rollout_is_threshold": "0.4_0.45",
    },
}


def make_rows():
    from raylight.learner.tokens.rows import TrainRow

    rows = []
    for index, (apart, mask, versions) in enumerate(zip(APART, MASKS, VERSIONS, strict=True)):
        ids, engine = torch.arange(len(apart)), -torch.ones(len(apart))
        row = TrainRow(index, index, ids[:1], ids, torch.tensor(mask), engine, torch.tensor(versions), 1.0)
        row.old_logprobs = engine + torch.tensor(apart)
        rows.append(row)
    return rows


def run_case(rows, settings):
    """Return the metrics, or the start of the error."""
    from raylight.learner.losses.correction import correct

    try:
        return correct(rows, CorrectionSettings(**settings))
    except MismatchError as error:
        return str(error)[:46]


def measured(rows):
    from raylight.learner.losses.correction import measure

    return measure(rows, 3, CorrectionSettings(max_logprob_mismatch=2.0))


def main(rank: int, ranks: int) -> dict[str, Any]:
    """Return the metrics, weights and masks of all cases."""
    from raylight.learner.losses.correction import has_tokens

    found = {"measured": measured(make_rows()[rank::ranks])}
    for name, settings in CASES.items():
        mine = make_rows()[rank::ranks]
        found[name] = run_case(mine, settings)
        found[f"{name} weights"] = {
            row.index: row.weights.tolist() for row in mine if row.weights is not None
        }
        found[f"{name} masks"] = {row.index: row.mask.tolist() for row in mine}
        found[f"{name} left"] = has_tokens(mine)
    copy = make_rows()[0]  # a rank without rows holds a copy that trains nothing
    if rank:
        copy.mask = torch.zeros_like(copy.mask)
    found["copy"] = run_case([copy], CASES["both"] | {"rollout_is_batch_normalize": True})
    return found
