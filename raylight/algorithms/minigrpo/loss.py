"""Group-relative advantages and the clipped loss, in plain torch (GRPO, https://arxiv.org/abs/2402.03300)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

EPSILON = 1e-6
"""Added to a standard deviation before it divides."""
CHUNK = 128
"""Tokens whose logits exist at once."""


def group_advantages(rewards: Sequence[float], groups: Sequence[str], by_std: bool = True) -> list[float]:
    """How much better each rollout is than the mean of its group, in units of the group's standard deviation.

    Args:
        rewards, groups: one entry per rollout.
        by_std: False leaves the difference as it is (Dr.GRPO).
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


def token_logprobs(
    head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    """Log-probabilities of tokens, shape (tokens,), without the logits of all of them ever existing at once: those of a chunk are
    computed, and again in the backward pass.

    Args:
        head: the output layer.
        hidden: states that predict the targets, shape (tokens, hidden size).
        targets, temperatures: shape (tokens,).
    """
    parts = []
    for begin in range(0, len(targets), CHUNK):
        end = begin + CHUNK
        given = (head, hidden[begin:end], targets[begin:end], temperatures[begin:end])
        parts.append(
            checkpoint(_chunk, *given, use_reentrant=False) if torch.is_grad_enabled() else _chunk(*given)
        )
    return torch.cat(parts)


def _chunk(
    head: torch.nn.Module, hidden: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor
) -> torch.Tensor:
    logits = head(hidden).float() / temperatures[:, None]
    return logits.gather(-1, targets[:, None])[:, 0] - logits.logsumexp(-1)


@dataclass(frozen=True)
class Loss:
    """The loss of some tokens, and sums over them for the metrics."""

    value: torch.Tensor
    clipped: float
    """Tokens whose ratio was clipped."""
    kl: float
    """Sum of their divergence from the reference; 0 without one."""


def clipped_loss(
    logprobs: torch.Tensor,
    old: torch.Tensor,
    advantages: torch.Tensor,
    ref: torch.Tensor | None,
    *,
    clip: tuple[float, float],
    kl_coef: float,
    tokens: int,
) -> Loss:
    """PPO's clipped objective (https://arxiv.org/abs/1707.06347) and the k3 estimate of the KL divergence
    (http://joschu.net/blog/kl-approx.html), summed over the given tokens and divided by those of the whole batch.

    Args:
        logprobs, old, advantages, ref: one entry per token.
        clip: how far below and above 1 the ratio counts.
        tokens: trained tokens of the whole batch.
    """
    ratio = (logprobs - old).exp()
    bounded = ratio.clamp(1 - clip[0], 1 + clip[1])
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    clipped = float((bounded * advantages < ratio * advantages).sum())
    if ref is None:
        return Loss(loss.sum() / tokens, clipped, 0.0)
    away = ref - logprobs
    kl = away.exp() - away - 1
    return Loss((loss + kl_coef * kl).sum() / tokens, clipped, float(kl.detach().sum()))
