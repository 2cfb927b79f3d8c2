"""The policy loss of micro-batches: its terms, and the metrics that it reports."""

from typing import get_args

import pytest
import torch

from raylight.experience.settings.policy_settings import LossAggregation, PolicySettings
from raylight.learner.losses.metrics import all_reduce_metrics, rename_metrics
from raylight.learner.losses.policy_loss import PolicyLoss
from raylight.learner.tokens.micro_batch import MicroBatch
from raylight.learner.tokens.rows import TrainRow
from raylight.learner.verl_api import append_to_dict

pytestmark = pytest.mark.usefixtures("one_rank")


def row_of(index: int, tokens: int) -> TrainRow:
    """A rollout of one row; every token has log-prob -1, and the reference's is lower by 0.1 * index."""
    ones, zeros = torch.ones(tokens, dtype=torch.long), torch.zeros(tokens)
    logprobs = {"old_logprobs": zeros - 1, "ref_logprobs": zeros - 1 - 0.1 * index}
    return TrainRow(
        index, index, torch.tensor([1]), ones, ones, zeros - 1, 0 * ones, 1.0, zeros + 1.0, **logprobs
    )


@pytest.mark.parametrize("mode", get_args(LossAggregation))
def test_entropy_kl_and_divergence_are_per_token_whatever_the_loss_sums(mode):
    rows = [row_of(index, tokens) for index, tokens in enumerate((50, 2, 7, 1))]
    tokens, numbers = sum(len(row.response) for row in rows), torch.arange(4.0)[:, None]
    loss = PolicyLoss(PolicySettings(loss_agg_mode=mode, kl_coef=0.1, kl_type="k2"), rows)
    metrics = {}
    for own in (slice(0, 2), slice(2, 4)):
        batch = MicroBatch(rows[own], torch.device("cpu"), False, rollouts=4, tokens=tokens, dp_size=1)
        values = (0.5 + numbers[own]).where(batch.mask, 9.0)
        outputs = {
            "log_probs": torch.full(batch.mask.shape, -1.0),
            "entropy": values,
            "divergence": 2 * values,
        }
        append_to_dict(metrics, loss(outputs, batch)[1])
    found = rename_metrics(all_reduce_metrics(metrics))
    mean = (50 * 0 + 2 * 1 + 7 * 2 + 1 * 3) / 60
    assert found["learner/entropy"] == pytest.approx(0.5 + mean)
    assert found["learner/divergence"] == pytest.approx(1 + 2 * mean)
    assert found["learner/kl"] == pytest.approx(0.005 * (2 * 1 + 7 * 4 + 1 * 9) / 60, rel=1e-5)
