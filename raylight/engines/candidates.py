"""Tokens that could have been sampled, as engines record them for a learner."""

from __future__ import annotations

import numpy as np
import torch

from raylight.types import NEVER_SAMPLED_BELOW, TokenSets


def find_candidates(logprobs: torch.Tensor) -> TokenSets:
    """Return the tokens that could have been sampled in each row.

    Only short lists of ids leave the device, and the masks of rows that excluded less.

    In a row that excludes tokens, those below NEVER_SAMPLED_BELOW are excluded too: a truncation to the k
    most probable tokens keeps some that a bias bans, which the learner would not know.

    Args:
        logprobs: the distributions that were sampled from, shape (rows, vocabulary); minus infinity for
            tokens that could not be sampled.
    """
    allowed = logprobs > -torch.inf
    allowed &= (logprobs > NEVER_SAMPLED_BELOW) | allowed.all(-1, keepdim=True)
    counts = allowed.sum(-1).cpu()
    words = -(-allowed.shape[1] // 32)
    short, dense = counts <= words, (counts > words) & (counts < allowed.shape[1])
    rows: list[TokenSets] = [TokenSets.unrestricted(1)] * len(counts)
    if short.any():
        ids = allowed[short.to(allowed.device)].nonzero()[:, 1].to(torch.int32).cpu().numpy()
        _place(rows, short, TokenSets(counts[short].numpy().astype(np.int32), ids))
    if dense.any():
        _place(rows, dense, TokenSets.from_mask(allowed[dense.to(allowed.device)].cpu().numpy()))
    return TokenSets.join(rows)


def _place(rows: list[TokenSets], chosen: torch.Tensor, found: TokenSets) -> None:
    for row, part in zip(chosen.nonzero()[:, 0].tolist(), found.split([1] * len(found)), strict=True):
        rows[row] = part
