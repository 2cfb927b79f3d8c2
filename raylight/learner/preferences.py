"""Losses of pairs of answers, one of which is preferred to the other: of a policy, and of a reward model."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from raylight.experience.supervised_settings import PairSettings, PreferenceSettings, RewardModelSettings


def pair_losses(values: torch.Tensor, facts: torch.Tensor, settings: PairSettings) -> torch.Tensor:
    """Return the loss of each pair, shape (pairs,).

    Args:
        values: of each answer, shape (2 pairs,), the chosen answer of each pair before the rejected one: the
            log ratio of its probability to the initial model's, or the score of a reward model.
        facts: the number of tokens of each answer; for a reward model the margin of each chosen answer, and 0
            for the others. Same shape.
    """
    if isinstance(settings, RewardModelSettings):
        losses = -logsigmoid(_margin(values) - facts[0::2])
        return losses + settings.center_rewards_coefficient * (values[0::2] + values[1::2]) ** 2
    assert isinstance(settings, PreferenceSettings)
    return _preference_losses(values, facts, settings)


def _preference_losses(
    ratios: torch.Tensor, tokens: torch.Tensor, settings: PreferenceSettings
) -> torch.Tensor:
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


def pair_statistics(values: torch.Tensor, facts: torch.Tensor, settings: PairSettings) -> dict[str, float]:
    """Return sums over the pairs, and their `count`: the loss, the rewards of both answers (the score, or
    beta times the log ratio), their margin, and the pairs whose chosen answer has the higher reward.

    Args:
        values, facts: as for `pair_losses`.
    """
    scale = settings.beta if isinstance(settings, PreferenceSettings) else 1.0
    chosen, rejected = scale * values[0::2], scale * values[1::2]
    return {
        "loss": float(pair_losses(values, facts, settings).sum()),
        "accuracy": float((chosen > rejected).sum()),
        "margin": float((chosen - rejected).sum()),
        "chosen_reward": float(chosen.sum()),
        "rejected_reward": float(rejected.sum()),
        "count": float(len(chosen)),
    }


def _margin(values: torch.Tensor) -> torch.Tensor:
    return values[0::2] - values[1::2]
