"""Losses of pairs of answers, one of which is preferred to the other."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from raylight.experience.supervised_settings import PreferenceSettings


def pair_losses(ratios: torch.Tensor, tokens: torch.Tensor, settings: PreferenceSettings) -> torch.Tensor:
    """Return the loss of each pair, shape (pairs,).

    Args:
        ratios: log ratio of the probability of each answer to the initial model's, shape (2 pairs,): the
            chosen answer of each pair before the rejected one.
        tokens: tokens of each answer, in the same shape.
    """
    margin = _margin(ratios)
    beta, smoothing = settings.beta, settings.label_smoothing
    if settings.loss_type == "hinge":
        return torch.relu(1 - beta * margin)
    if settings.loss_type == "ipo":
        return (_margin(ratios / tokens.clamp(min=1)) - 1 / (2 * beta)) ** 2
    right, wrong = -logsigmoid(beta * margin), -logsigmoid(-beta * margin)
    if settings.loss_type == "robust":
        return ((1 - smoothing) * right - smoothing * wrong) / (1 - 2 * smoothing)
    return (1 - smoothing) * right + smoothing * wrong


def pair_statistics(
    ratios: torch.Tensor, tokens: torch.Tensor, settings: PreferenceSettings
) -> dict[str, float]:
    """Return sums over the pairs, and their `count`: the loss, the rewards of both answers (beta times the
    log ratio), their margin, and the pairs whose chosen answer has the higher reward."""
    chosen, rejected = settings.beta * ratios[0::2], settings.beta * ratios[1::2]
    return {
        "loss": float(pair_losses(ratios, tokens, settings).sum()),
        "accuracy": float((chosen > rejected).sum()),
        "margin": float((chosen - rejected).sum()),
        "chosen_reward": float(chosen.sum()),
        "rejected_reward": float(rejected.sum()),
        "count": float(len(chosen)),
    }


def _margin(values: torch.Tensor) -> torch.Tensor:
    return values[0::2] - values[1::2]
