"""Mismatch of engine and learner: measurement, and correction by importance weights and rejection."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from raylight.errors import MismatchError
from raylight.experience.settings.correction_settings import (
    TAIL,
    CorrectionSettings,
    describe_excess,
    parse_weight_bounds,
)
from raylight.learner import verl_api as verl
from raylight.learner.tokens.rows import TrainRow

MAX_LOG_RATIO = 20.0
"""Bound to which log ratios are clamped before they are exponentiated, as in verl."""
TAIL_RANGE, BINS_PER_DECADE = (-8, 4), 100
"""Powers of ten, and bins for each, of the histogram from which a quantile is read. Ranks add histograms up,
so that the result does not depend on their number."""


def measure(rows: list[TrainRow], version: int, settings: CorrectionSettings) -> dict[str, float]:
    """Measure the difference of engine and learner log-probs; return metrics of all ranks. A collective.

    Both are log-probs of the policy without the constraints of requests (grammars, biases).

    `mismatch/logprob_abs_*` (mean, 99.9 % quantile, maximum) are over sampled tokens of `version`, for which
    both had the same weights, and missing if there are none. The others are over all sampled tokens: the KL
    divergence of the learner from the engine by the estimators k1 and k3
    (http://joschu.net/blog/kl-approx.html), the effective sample size of the probability ratios as a fraction
    of the tokens, and the fraction of tokens sampled by older versions. `mismatch/warned` is 1 if the mean
    difference is above `warn_logprob_mismatch`. `mismatch/stale_*` are over tokens of older versions, and
    missing if there are none. They have no limit, because the learner's updates since then are part of them.

    Args:
        rows: this rank's.

    Raises:
        MismatchError: a log-prob is NaN; or they differ by more than `max_logprob_mismatch` allows, and the
            settings do not correct for it.
    """
    log_ratio = _select_sampled(rows, [_log_ratio(row) for row in rows]).double()
    is_current = _select_sampled(rows, [row.versions == version for row in rows])
    differences, stale_differences = log_ratio[is_current].abs(), log_ratio[~is_current].abs()
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    worst, stale_worst = _all_reduce(
        [float(part.max()) if len(part) else 0.0 for part in (differences, stale_differences)],
        torch.distributed.ReduceOp.MAX,
    )
    tokens, current, difference, stale_difference, k1, stale_k1, k3, total, squares = _all_reduce(
        [
            len(ratio),
            len(differences),
            differences.sum(),
            stale_differences.sum(),
            -log_ratio.sum(),
            -log_ratio[~is_current].sum(),
            (ratio - 1 - log_ratio).sum(),
            ratio.sum(),
            ratio.square().sum(),
        ]
    )
    old = tokens - current
    if math.isnan(k1):
        raise MismatchError(
            "a log-prob of engine or learner is NaN, of tokens of weight versions up to "
            f"{version}: look for NaN in the weights (learner/grad_norm of the steps before), and train and "
            "serve in float32 to find the side that has it"
        )
    tail = _tail(differences, current, worst)
    stale_tail = _tail(stale_differences, old, stale_worst)
    mean = difference / current if current else 0.0
    excess = describe_excess(mean, tail, settings.max_logprob_mismatch)
    if excess is not None and not settings.tolerates_mismatch:
        raise MismatchError(
            f"log-probs of engine and learner {excess} for weight version {version}. Either the engine lacks "
            "these weights, or the two compute the model differently (precision, kernels, routing of "
            'experts). rollout_is="token" corrects for it; max_logprob_mismatch sets the limits'
        )
    fresh = {
        "mismatch/logprob_abs_max": worst,
        "mismatch/logprob_abs_p999": tail,
        "mismatch/logprob_abs_mean": mean,
    }
    stale = {
        "mismatch/stale_logprob_abs_mean": stale_difference / max(old, 1),
        "mismatch/stale_logprob_abs_p999": stale_tail,
        "mismatch/stale_kl": stale_k1 / max(old, 1),
    }
    return (
        (fresh if current else {})
        | (stale if old else {})
        | {
            "mismatch/kl": k1 / tokens,
            "mismatch/kl_k3": k3 / tokens,
            "mismatch/ess": total**2 / (tokens * squares),
            "mismatch/stale_fraction": 1 - current / tokens,
            "mismatch/warned": float(mean > settings.warning_threshold),
        }
    )


def _tail(differences: torch.Tensor, count: float, worst: float) -> float:
    """Return the quantile TAIL of the differences on all ranks, rounded up by at most 2.4 %; 0 if there are
    none. A collective.

    Args:
        differences: this rank's, shape (sampled tokens,).
        count: number of differences on all ranks.
        worst: their maximum on all ranks.
    """
    low, high = TAIL_RANGE
    exponents = differences.clamp(min=10.0**low, max=10.0**high).log10()
    counts = torch.histc(exponents, (high - low) * BINS_PER_DECADE, low, high)
    torch.distributed.all_reduce(counts)
    if not count:
        return 0.0
    position = int((counts.cumsum(0) < TAIL * count).sum())
    return min(worst, 10.0 ** (low + (position + 1) / BINS_PER_DECADE))


def correct(rows: list[TrainRow], settings: CorrectionSettings) -> dict[str, float]:
    """Set the rows' importance weights, mask rejected tokens, and return metrics of all ranks. A collective.

    Each row has the log-probs of the old policy, recomputed by the learner. They are the proximal policy of
    the loss, and the weights correct for the engine that sampled (decoupled PPO,
    https://arxiv.org/abs/2110.00641). verl's "sequence" is a row. The metrics describe the weights before
    normalization.

    Args:
        rows: this rank's.

    Raises:
        MismatchError: the correction leaves no token to train on.
    """
    mask = pad_sequence([row.mask for row in rows], batch_first=True)
    log_ratio = pad_sequence([_log_ratio(row) for row in rows], batch_first=True)
    weighted = settings.importance_level is not None
    weights = bounded_weights(log_ratio, mask, settings) if weighted else mask.float()
    accepted = _accepted(log_ratio, mask, settings)
    sampled_counts, accepted_counts = mask.sum(-1), accepted.sum(-1)
    tokens, remaining, nonempty, emptied, total_weight = _all_reduce(
        [
            sampled_counts.sum(),
            accepted_counts.sum(),
            (sampled_counts > 0).sum(),
            ((sampled_counts > 0) & (accepted_counts == 0)).sum(),
            (weights.double() * accepted).sum(),
        ]
    )
    if not total_weight > 0:
        raise MismatchError(
            "rollout correction leaves no token to train on: the ratio of learner to engine probability is "
            f"out of bounds everywhere (rollout_is_threshold {settings.rollout_is_threshold}, rollout_rs "
            f"{settings.rollout_rs} with rollout_rs_threshold {settings.rollout_rs_threshold}). Widen the "
            "bounds, or check mismatch/kl of the steps before"
        )
    metrics: dict[str, float] = {}
    if weighted:
        metrics = _weight_metrics(weights, mask, settings)
        if settings.rollout_is_batch_normalize:
            weights = weights / _mean_weight(weights, mask, settings)
    for row, row_weights, row_accepted in zip(rows, weights, accepted, strict=True):
        row.weights = row_weights[: len(row.response)] if weighted else None
        row.mask = row_accepted[: len(row.response)]
    if settings.rollout_rs is not None:
        metrics |= {
            "mismatch/rejected_tokens": 1 - remaining / tokens,
            "mismatch/rejected_rows": emptied / nonempty,
        }
    return metrics


def set_weights(rows: list[TrainRow], settings: CorrectionSettings) -> None:
    """Set the rows' importance weights before rejection, for an estimator that reads them."""
    mask = pad_sequence([row.mask for row in rows], batch_first=True)
    log_ratio = pad_sequence([_log_ratio(row) for row in rows], batch_first=True)
    for row, weights in zip(rows, bounded_weights(log_ratio, mask, settings), strict=True):
        row.weights = weights[: len(row.response)]


def has_tokens(rows: list[TrainRow]) -> bool:
    """True if any rank has a token to train on in its rows. A collective."""
    return _all_reduce([sum(int(row.mask.sum()) for row in rows)])[0] > 0


def set_proximal_fractions(rows: list[TrainRow], version: int) -> None:
    """Set each token's place of the proximal policy between the engine's and the one being trained.

    The version that sampled is v, the proximal policy is `version`, and the update leads to the version after
    it, so that the place is (version - v) / (version + 1 - v), as in AReaL's `prox_logp_method=loglinear`.
    """
    for row in rows:
        age = (version - row.versions).clamp(min=0) * row.mask
        row.proximal_fractions = age / (age + 1)


def measure_interpolated_weights(rows: list[TrainRow], settings: CorrectionSettings) -> dict[str, float]:
    """Return metrics of the weights of an interpolated proximal policy before the first step, on all ranks. A
    collective.

    Args:
        rows: this rank's, with the learner's log-probs.
    """
    mask = pad_sequence([row.mask for row in rows], batch_first=True)
    log_weights = [_proximal_fractions(row) * _log_ratio(row) for row in rows]
    weights = bounded_weights(pad_sequence(log_weights, batch_first=True), mask, settings)
    return _weight_metrics(weights, mask, settings)


def _proximal_fractions(row: TrainRow) -> torch.Tensor:
    assert row.proximal_fractions is not None
    return row.proximal_fractions


def bounded_weights(
    log_ratio: torch.Tensor, mask: torch.Tensor, settings: CorrectionSettings
) -> torch.Tensor:
    """Return the bounded ratios of shape (rows, longest response), 0 for tokens that were not sampled.

    The same as verl's `compute_rollout_correction_weights`, which raises if all weights of a rank are zero.
    """
    lower, upper = parse_weight_bounds(settings.rollout_is_threshold)
    if settings.importance_level == "sequence":
        log_ratio = (log_ratio * mask).sum(-1, keepdim=True).expand_as(log_ratio)
    ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * mask
    return ratio.clamp(max=upper) if lower is None else ratio.where((ratio >= lower) & (ratio <= upper), 0.0)


def _accepted(log_ratio: torch.Tensor, mask: torch.Tensor, settings: CorrectionSettings) -> torch.Tensor:
    """Return the mask, shape (rows, longest response), without rejected tokens."""
    # verl raises for rows without tokens, but another rank may have tokens
    if settings.rollout_rs is None or not mask.any():
        return mask
    criteria = settings.rollout_rs.replace(" ", "")
    return verl.compute_rollout_rejection_mask(log_ratio, mask, criteria, settings.rollout_rs_threshold)[0]


def _weight_metrics(
    weights: torch.Tensor, mask: torch.Tensor, settings: CorrectionSettings
) -> dict[str, float]:
    """Return metrics of the weights, shape (rows, longest response), of sampled tokens on all ranks."""
    lower, upper = parse_weight_bounds(settings.rollout_is_threshold)
    sampled = weights[mask == 1]
    clipped = sampled == 0 if lower is not None else sampled >= torch.tensor(upper)
    sampled = sampled.double()
    extremes = [-float(sampled.min()), float(sampled.max())] if len(sampled) else [-math.inf, -math.inf]
    negative_min, highest = _all_reduce(extremes, torch.distributed.ReduceOp.MAX)
    tokens, total, squares, truncated = _all_reduce(
        [len(sampled), sampled.sum(), sampled.square().sum(), clipped.sum()]
    )
    mean = total / tokens
    return {
        "mismatch/weight_mean": mean,
        "mismatch/weight_min": -negative_min,
        "mismatch/weight_max": highest,
        "mismatch/weight_std": max(squares / tokens - mean**2, 0.0) ** 0.5,
        "mismatch/weight_ess": total**2 / (tokens * squares),
        "mismatch/truncated": truncated / tokens,
    }


def _mean_weight(weights: torch.Tensor, mask: torch.Tensor, settings: CorrectionSettings) -> float:
    """Return the mean weight of the tokens of all ranks, or of the rows if a row has one weight."""
    if settings.importance_level == "sequence":
        weights, mask = weights.amax(-1), mask.amax(-1)
    total, count = _all_reduce([(weights.double() * mask).sum(), mask.sum()])
    return total / count


def _log_ratio(row: TrainRow) -> torch.Tensor:
    """Return the log ratio of learner to engine probability, shape (response tokens,)."""
    learner = row.old_logprobs if row.learner_logprobs is None else row.learner_logprobs
    assert learner is not None
    return learner - row.engine_logprobs


def _select_sampled(rows: list[TrainRow], tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the entries of sampled tokens, row after row, shape (sampled tokens,)."""
    return torch.cat(tensors)[torch.cat([row.mask for row in rows]) == 1]


def _all_reduce(
    values: Sequence[float | torch.Tensor], operation: object = torch.distributed.ReduceOp.SUM
) -> list[float]:
    reduced = torch.tensor([float(value) for value in values], dtype=torch.float64)
    torch.distributed.all_reduce(reduced, op=operation)
    return reduced.tolist()
