"""The policy loss of micro-batches: its terms, and the metrics that it reports."""

from typing import get_args

import pytest
import torch
from torch.nn.utils.rnn import pad_sequence

from raylight.experience.batches.batch import TrainBatch
from raylight.experience.batches.shards import shard_batch
from raylight.experience.settings.losses import LOSSES
from raylight.experience.settings.policy_settings import LossAggregation, PolicySettings
from raylight.experience.settings.registry import policy_loss
from raylight.learner.losses.advantages import KlController, add_advantages
from raylight.learner.losses.metrics import all_reduce_metrics, rename_metrics
from raylight.learner.losses.policy_loss import PolicyLoss
from raylight.learner.tokens.micro_batch import MicroBatch
from raylight.learner.tokens.rows import TrainRow, build_rows
from raylight.learner.verl_api import append_to_dict
from raylight.types import Trajectory

pytestmark = pytest.mark.usefixtures("one_rank")


def row_of(index: int, tokens: int) -> TrainRow:
    """A rollout of one row; every token has log-prob -1, and the reference's is lower by 0.1 * index."""
    ones, zeros = torch.ones(tokens, dtype=torch.long), torch.zeros(tokens)
    logprobs = {"old_logprobs": zeros - 1, "ref_logprobs": zeros - 1 - 0.1 * index}
    return TrainRow(
        index, index, torch.tensor([1]), ones, ones, zeros - 1, 0 * ones, 1.0, zeros + 1.0, **logprobs
    )


@policy_loss("own_penalty")
def own_penalty(log_prob, old_log_prob, advantages):
    return -advantages * log_prob + 0.5 * (log_prob - old_log_prob) ** 2


SETTINGS = {
    "dro": {"dro_beta": 0.5},
    "kl_cov": {"kl_cov_ratio": 0.5, "ppo_kl_coef": 1.0},
    "clip_cov": {"clip_cov_ratio": 1.0, "clip_cov_lb": 0.1, "clip_cov_ub": 0.4},
}
SHIFTS = (0.3, -0.2, 0.1, 0.4)
"""Log-probs of the policy less the old ones, again and again."""


def loss_and_gradient(loss, lengths, weighted):
    """Return the loss of two rollouts of 12 tokens each, and its gradient by their log-probs.

    Args:
        lengths: tokens of the rows of each rollout.
    """
    settings = PolicySettings(loss_agg_mode="seq-mean-token-mean", loss_mode=loss, **SETTINGS.get(loss, {}))
    owners = [rollout for rollout in range(2) for _ in lengths]
    trajectories = [
        Trajectory("r", range(2 + n), [0, 0] + [1] * n, [0.0] * 2 + [-1.0] * n, [-1] * 2 + [0] * n)
        for n in lengths * 2
    ]
    batch = TrainBatch([1.0, 0.0], ["g", "g"], trajectories, owners)
    (shard,) = shard_batch(batch, settings, 1)
    by_index = build_rows(shard.rows, owners)
    rows = list(by_index.values())
    add_advantages(shard.outline, rows, settings, KlController(settings))
    shifts = torch.tensor(SHIFTS * 3).split(lengths) * 2
    for row, own in zip(rows, shifts, strict=True):
        row.old_logprobs = torch.full((len(own),), -1.0)
        row.weights = 1 + own if weighted else None
    logprobs = pad_sequence([own - 1 for own in shifts], batch_first=True).requires_grad_()
    micro = MicroBatch(rows, torch.device("cpu"), False, rollouts=2, tokens=24, dp_size=1)
    value, _ = PolicyLoss(settings, rows)({"log_probs": logprobs}, micro)
    (gradient,) = torch.autograd.grad(value, logprobs)
    return value.detach(), gradient[micro.mask]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("loss", [*LOSSES.names, "own_penalty"])
def test_a_rollout_counts_once_in_a_mean_over_rows(loss, weighted):
    value, gradient = loss_and_gradient(loss, [12], weighted)
    assert gradient.abs().max() > 0.01
    by_row = loss in ("gspo", "geo_mean")  # they have one ratio for each row
    for lengths in ([4, 4, 4], [4, 8]) if by_row else ([4, 4, 4], [1, 11], [5, 4, 3]):
        found, gradients = loss_and_gradient(loss, lengths, weighted)
        torch.testing.assert_close(found, value)
        torch.testing.assert_close(gradients, gradient)


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
