"""Group-relative advantages and the clipped loss, in plain torch (GRPO, https://arxiv.org/abs/2402.03300)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

EPSILON = 1e-6
"""Added to the standard deviation in a denominator."""


def group_advantages(rewards: Sequence[float], groups: Sequence[str], by_std: bool = True) -> list[float]:
    """Return the advantage of each rollout: reward less the group's mean, divided by the group's standard
    deviation.

    Args:
        rewards: one reward per rollout.
        groups: one group name per rollout.
        by_std: False omits the division (Dr.GRPO).
    """
    members: dict[str, list[int]] = {}
    for index, group in enumerate(groups):
        members.setdefault(group, []).append(index)
    advantages = [0.0] * len(rewards)
    for indices in members.values():
        values = torch.tensor([rewards[i] for i in indices], dtype=torch.float64)
        centred = values - values.mean()
        if len(indices) > 1 and by_std:
            centred = centred / (values.std() + EPSILON)
        for i, advantage in zip(indices, centred.tolist(), strict=True):
            advantages[i] = advantage
    return advantages


@dataclass(frozen=True)
class LossTerms:
    """Loss of a micro-batch, and sums over its tokens for the metrics."""

    value: torch.Tensor
    clipped: float
    """Number of tokens whose ratio was clipped."""
    kl: float
    """Sum of the tokens' KL divergence from the reference; 0 without a reference."""


def clipped_loss(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    ref: torch.Tensor | None,
    *,
    clip: tuple[float, float],
    kl_coef: float,
    tokens: int,
) -> LossTerms:
    """Return PPO's clipped objective (https://arxiv.org/abs/1707.06347) with a KL penalty, for the tokens of
    a micro-batch.

    The KL divergence is estimated by k3 (http://joschu.net/blog/kl-approx.html). The sum over tokens is
    divided by the number of tokens of the whole batch.

    Args:
        logprobs: log-probs under the trained policy, shape (tokens,), like the next three.
        old: log-probs under the old policy.
        advantages: advantages of the tokens' rollouts.
        ref: log-probs under the reference; None: no KL penalty.
        clip: clip range of the ratio below and above 1.
        kl_coef: weight of the KL penalty.
        tokens: number of trained tokens of the whole batch.
    """
    ratio = (logprobs - old).exp()
    bounded = ratio.clamp(1 - clip[0], 1 + clip[1])
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    clipped = float((bounded * advantages < ratio * advantages).sum())
    if ref is None:
        return LossTerms(loss.sum() / tokens, clipped, 0.0)
    log_ratio = ref - logprobs
    kl = log_ratio.exp() - log_ratio - 1
    return LossTerms((loss + kl_coef * kl).sum() / tokens, clipped, float(kl.detach().sum()))
