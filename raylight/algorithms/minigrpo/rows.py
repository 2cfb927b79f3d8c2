"""Rows with advantages, and their micro-batches as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    positions: list[int] = []
    targets: list[int] = []
    versions: list[int] = []
    temperatures: list[float] = []
    advantages: list[float] = []
    sampled_logprobs: list[float] = []
    for number, row in enumerate(rows):
        trajectory = row.trajectory
        ids[number, : row.length] = torch.tensor(trajectory.token_ids)
        trained = [index for index, mask in enumerate(trajectory.mask) if mask]
        positions += [number * width + index - 1 for index in trained]
        targets += [trajectory.token_ids[index] for index in trained]
        versions += [trajectory.weight_versions[index] for index in trained]
        sampled_logprobs += [trajectory.logprobs[index] for index in trained]
        temperatures += [trajectory.temperature] * len(trained)
        advantages += [row.advantage] * len(trained)
    return TokenBatch(
        ids.to(device),
        torch.tensor(positions, device=device),
        torch.tensor(targets, device=device),
        torch.tensor(temperatures, device=device),
        torch.tensor(advantages, device=device),
        torch.tensor(sampled_logprobs, device=device),
        torch.tensor(versions, device=device),
    )
