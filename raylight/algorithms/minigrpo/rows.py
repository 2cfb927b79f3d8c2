"""Rows with advantages, and their micro-batches as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from raylight.experience.batch import TrainBatch
from raylight.types import Trajectory


@dataclass(frozen=True)
class AdvantageRow:
    """Trajectory with the advantage of its rollout."""

    trajectory: Trajectory
    advantage: float

    @property
    def length(self) -> int:
        """Number of tokens, prompts included."""
        return len(self.trajectory.token_ids)


@dataclass(frozen=True)
class TokenBatch:
    """Micro-batch as tensors. All fields but `ids` have shape (trained tokens,).

    Rows are padded on the right; causal attention never reads the padding of earlier tokens, so there is no
    mask.
    """

    ids: torch.Tensor
    """Token ids, shape (rows, length of the longest row)."""
    positions: torch.Tensor
    """Index into the flattened hidden states of the one that predicts each trained token."""
    targets: torch.Tensor
    temperatures: torch.Tensor
    advantages: torch.Tensor
    sampled_logprobs: torch.Tensor
    """Log-probs from sampling."""
    versions: torch.Tensor
    """Versions of the weights that sampled the tokens."""


def advantage_rows(batch: TrainBatch, advantages: Sequence[float]) -> list[AdvantageRow]:
    """Return a row per trajectory; all rows of a rollout share its advantage."""
    return [AdvantageRow(row, advantages[owner]) for row, owner in zip(batch.rows, batch.owners, strict=True)]


def split_micro_batches(rows: Sequence[AdvantageRow], limit: int) -> Iterator[list[AdvantageRow]]:
    """Yield all rows in micro-batches of similar lengths, each with at most `limit` tokens, padding
    included."""
    part: list[AdvantageRow] = []
    for row in sorted(
        rows, key=lambda row: row.length, reverse=True
    ):  # the first row of a part is the longest
        if part and part[0].length * (len(part) + 1) > limit:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def to_token_batch(rows: Sequence[AdvantageRow], device: torch.device) -> TokenBatch:
    """Return a micro-batch as tensors on a device."""
    width = max(row.length for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    trained = [np.flatnonzero(row.trajectory.mask) for row in rows]
    counts = torch.tensor([len(indices) for indices in trained])
    for number, row in enumerate(rows):
        ids[number, : row.length] = torch.tensor(row.trajectory.token_ids)

    def select(name: str) -> torch.Tensor:
        """Return a field of the trajectories at their trained tokens."""
        parts = [getattr(row.trajectory, name)[indices] for row, indices in zip(rows, trained, strict=True)]
        return torch.from_numpy(np.concatenate(parts)).to(device)

    def repeat(values: list[float]) -> torch.Tensor:
        """Return a value of each row for each of its trained tokens."""
        return torch.tensor(values).repeat_interleave(counts).to(device)

    positions = [number * width + indices - 1 for number, indices in enumerate(trained)]
    return TokenBatch(
        ids.to(device),
        torch.from_numpy(np.concatenate(positions)).to(device),
        select("token_ids").long(),
        repeat([row.trajectory.temperature for row in rows]),
        repeat([row.advantage for row in rows]),
        select("logprobs"),
        select("weight_versions"),
    )
