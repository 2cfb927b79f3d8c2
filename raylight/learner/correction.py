"""Engine and learner compared: how far their log-probs are apart, and what is done about it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from raylight.errors import MismatchError
from raylight.experience.correction_settings import CorrectionSettings, parse_weight_bounds
from raylight.learner import verl_api as verl
from raylight.learner.rows import TrainRow

BOUND = 20.0
"""Where logarithms of ratios are cut off before they are exponents, as verl does."""


def measure(rows: list[TrainRow], version: int, settings: CorrectionSettings) -> dict[str, float]:
    """How far the engine's log-probs are from the learner's, on all ranks; returns metrics. A collective.

    `mismatch/logprob_abs_*` are over sampled tokens of `version`, whose weights both had; the others over all sampled tokens: the
    divergence of the learner from the engine by the estimators k1 and k3 (http://joschu.net/blog/kl-approx.html), the effective
    sample size of the ratios of probabilities as a share of the tokens, and the share of tokens that older versions sampled.
    `mismatch/warned` is 1 where the largest difference is above `warn_logprob_mismatch`.

    Raises:
        MismatchError: they differ by more than `max_logprob_mismatch`, or no token is of that version.
    """
    log_ratio = _of_sampled(rows, [_log_ratio(row) for row in rows]).double()
    fresh = _of_sampled(rows, [row.versions == version for row in rows])
    apart = log_ratio[fresh].abs()
    ratio = log_ratio.clamp(-BOUND, BOUND).exp()
    worst = _over_ranks([float(apart.max()) if len(apart) else 0.0], torch.distributed.ReduceOp.MAX)[0]
    tokens, current, difference, k1, k3, total, squares = _over_ranks(
        [
            len(ratio),
            len(apart),
            apart.sum(),
            -log_ratio.sum(),
            (ratio - 1 - log_ratio).sum(),
            ratio.sum(),
            ratio.square().sum(),
        ]
    )
    if math.isnan(k1):
        worst = math.nan  # which a maximum over ranks may lose
    limit = settings.max_logprob_mismatch
    if not current:
        raise MismatchError(
            f"no token of the batch was sampled from weight version {version}: the engine did not take the new weights"
        )
    if not worst <= limit:  # also when it is NaN
        raise MismatchError(
            f"log-probs of engine and learner differ by up to {worst:.2g} for weight version {version}, more than "
            f"{limit:g}. Either the agent samples with top_p, top_k or a grammar (JSON schema, required tools), or the engine "
            "lacks these weights; max_logprob_mismatch sets the limit"
        )
    return {
        "mismatch/logprob_abs_max": worst,
        "mismatch/logprob_abs_mean": difference / current,
        "mismatch/kl": k1 / tokens,
        "mismatch/kl_k3": k3 / tokens,
        "mismatch/ess": total**2 / (tokens * squares),
        "mismatch/stale_fraction": 1 - current / tokens,
        "mismatch/warned": float(worst > settings.warning_threshold),
    }


def correct(rows: list[TrainRow], settings: CorrectionSettings) -> dict[str, float]:
    """Give rows their importance weights, and mask what is left out; returns metrics of all ranks. A collective.

    Each row has the log-probs of the old policy, recomputed by the learner: they are the proximal policy of the loss, and the
    weights correct for the engine that sampled (decoupled PPO, https://arxiv.org/abs/2110.00641). What verl calls a sequence is a
    row. The weights' metrics are of those before they are normalised.

    Args:
        rows: this rank's.

    Raises:
        MismatchError: nothing would be left to train on.
    """
    mask = _padded([row.mask for row in rows])
    log_ratio = _padded([_log_ratio(row) for row in rows])
    weights = _weights(log_ratio, mask, settings) if settings.rollout_is is not None else mask.float()
    kept = _kept(log_ratio, mask, settings)
    sampled, left = mask.sum(-1), kept.sum(-1)
    tokens, remaining, full, emptied, pull = _over_ranks(
        [
            sampled.sum(),
            left.sum(),
            (sampled > 0).sum(),
            ((sampled > 0) & (left == 0)).sum(),
            (weights.double() * kept).sum(),
        ]
    )
    if not pull > 0:
        raise MismatchError(
            "rollout correction leaves no token to train on: the ratio of learner to engine probability is out of bounds "
            f"everywhere (rollout_is_threshold {settings.rollout_is_threshold}, rollout_rs {settings.rollout_rs} with "
            f"rollout_rs_threshold {settings.rollout_rs_threshold}). Widen them, or look at mismatch/kl of the steps before"
        )
    metrics: dict[str, float] = {}
    if settings.rollout_is is not None:
        metrics = _weight_metrics(weights, mask, settings)
        if settings.rollout_is_batch_normalize:
            weights = weights / _mean_weight(weights, mask, settings)
    for row, row_weights, row_kept in zip(rows, weights, kept, strict=True):
        row.weights = row_weights[: len(row.response)] if settings.rollout_is is not None else None
        row.mask = row_kept[: len(row.response)]
    if settings.rollout_rs is not None:
        metrics |= {
            "mismatch/rejected_tokens": 1 - remaining / tokens,
            "mismatch/rejected_rows": emptied / full,
        }
    return metrics


def any_left(rows: list[TrainRow]) -> bool:
    """Whether any rank has a token to train on among its rows. A collective."""
    return _over_ranks([sum(int(row.mask.sum()) for row in rows)])[0] > 0


def _weights(log_ratio: torch.Tensor, mask: torch.Tensor, settings: CorrectionSettings) -> torch.Tensor:
    """Ratios of probabilities within their bounds, 0 where nothing was sampled; shape (rows, longest response).

    verl's `compute_rollout_correction_weights`, which fails where a rank's weights are all zeroed.
    """
    lower, upper = parse_weight_bounds(settings.rollout_is_threshold)
    if settings.rollout_is == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True).expand_as(log_ratio)
    ratio = log_ratio.clamp(-BOUND, BOUND).exp() * mask
    return ratio.clamp(max=upper) if lower is None else ratio.where((ratio >= lower) & (ratio <= upper), 0.0)


def _kept(log_ratio: torch.Tensor, mask: torch.Tensor, settings: CorrectionSettings) -> torch.Tensor:
    """The mask without what is rejected."""
    if (
        settings.rollout_rs is None or not mask.any()
    ):  # verl refuses rows without tokens, but another rank may have some
        return mask
    names = settings.rollout_rs.replace(" ", "")
    return verl.compute_rollout_rejection_mask(log_ratio, mask, names, settings.rollout_rs_threshold)[0]


def _weight_metrics(
    weights: torch.Tensor, mask: torch.Tensor, settings: CorrectionSettings
) -> dict[str, float]:
    """Of the weights of sampled tokens on all ranks."""
    lower, upper = parse_weight_bounds(settings.rollout_is_threshold)
    chosen = weights[mask == 1]
    cut = chosen == 0 if lower is not None else chosen >= torch.tensor(upper)
    chosen = chosen.double()
    ends = [-float(chosen.min()), float(chosen.max())] if len(chosen) else [-math.inf, -math.inf]
    lowest, highest = _over_ranks(ends, torch.distributed.ReduceOp.MAX)
    tokens, total, squares, truncated = _over_ranks(
        [len(chosen), chosen.sum(), chosen.square().sum(), cut.sum()]
    )
    mean = total / tokens
    return {
        "mismatch/weight_mean": mean,
        "mismatch/weight_min": -lowest,
        "mismatch/weight_max": highest,
        "mismatch/weight_std": max(squares / tokens - mean**2, 0.0) ** 0.5,
        "mismatch/weight_ess": total**2 / (tokens * squares),
        "mismatch/truncated": truncated / tokens,
    }


def _mean_weight(weights: torch.Tensor, mask: torch.Tensor, settings: CorrectionSettings) -> float:
    """Of the tokens of all ranks, or of their rows where a row has one weight."""
    if settings.rollout_is == "sequence":
        weights, mask = weights.amax(-1), mask.amax(-1)
    total, count = _over_ranks([(weights.double() * mask).sum(), mask.sum()])
    return total / count


def _log_ratio(row: TrainRow) -> torch.Tensor:
    """Learner's less engine's log-prob of each token of the response."""
    learner = row.old_logprobs if row.seen_logprobs is None else row.seen_logprobs
    assert learner is not None
    return learner - row.engine_logprobs


def _of_sampled(rows: list[TrainRow], tensors: list[torch.Tensor]) -> torch.Tensor:
    """The entries of the rows' sampled tokens, one row after the other."""
    return torch.cat(tensors)[torch.cat([row.mask for row in rows]) == 1]


def _padded(tensors: list[torch.Tensor]) -> torch.Tensor:
    return pad_sequence(tensors, batch_first=True)


def _over_ranks(
    values: Sequence[float | torch.Tensor], how: Any = torch.distributed.ReduceOp.SUM
) -> list[float]:
    reduced = torch.tensor([float(value) for value in values], dtype=torch.float64)
    torch.distributed.all_reduce(reduced, op=how)
    return reduced.tolist()
