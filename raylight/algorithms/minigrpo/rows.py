"""Trajectories as they are trained: rows with their advantages, dealt to micro-batches by tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from raylight.experience.batch import TrainBatch
from raylight.types import Trajectory


@dataclass(frozen=True)
class MiniRow:
    """One trajectory and the advantage of its rollout."""

    trajectory: Trajectory
    advantage: float

    @property
    def tokens(self) -> int:
        return len(self.trajectory.token_ids)


@dataclass(frozen=True)
class Tokens:
    """A micro-batch as tensors: rows padded on the right, and below them one entry for each trained token.

    Causal attention never looks to the right, so that padding needs no mask.
    """

    ids: torch.Tensor
    """Shape (rows, width)."""
    places: torch.Tensor
    """Into the flattened states: that which predicts each trained token."""
    targets: torch.Tensor
    temperatures: torch.Tensor
    advantages: torch.Tensor
    sampled: torch.Tensor
    """Log-probabilities with which the tokens were sampled."""
    versions: torch.Tensor


def rows_of(batch: TrainBatch, advantages: Sequence[float]) -> list[MiniRow]:
    """A row for each trajectory; all rows of a rollout share its advantage."""
    return [MiniRow(row, advantages[owner]) for row, owner in zip(batch.rows, batch.owners, strict=True)]


def micro_batches(rows: Sequence[MiniRow], limit: int) -> Iterator[list[MiniRow]]:
    """Rows of similar length together, each time as many as have, padded, at most `limit` tokens; none is left out."""
    part: list[MiniRow] = []
    for row in sorted(
        rows, key=lambda row: row.tokens, reverse=True
    ):  # so that the first row of a part is its longest
        if part and part[0].tokens * (len(part) + 1) > limit:
            yield part
            part = []
        part.append(row)
    if part:
        yield part


def to_tokens(rows: Sequence[MiniRow], device: torch.device) -> Tokens:
    """The tensors of a micro-batch."""
    width = max(row.tokens for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    places: list[int] = []
    targets: list[int] = []
    versions: list[int] = []
    temperatures: list[float] = []
    advantages: list[float] = []
    sampled: list[float] = []
    for number, row in enumerate(rows):
        trajectory = row.trajectory
        ids[number, : row.tokens] = torch.tensor(trajectory.token_ids)
        trained = [place for place, mask in enumerate(trajectory.mask) if mask]
        places += [number * width + place - 1 for place in trained]
        targets += [trajectory.token_ids[place] for place in trained]
        versions += [trajectory.weight_versions[place] for place in trained]
        sampled += [trajectory.logprobs[place] for place in trained]
        temperatures += [trajectory.temperature] * len(trained)
        advantages += [row.advantage] * len(trained)
    return Tokens(
        ids.to(device),
        torch.tensor(places, device=device),
        torch.tensor(targets, device=device),
        torch.tensor(temperatures, device=device),
        torch.tensor(advantages, device=device),
        torch.tensor(sampled, device=device),
        torch.tensor(versions, device=device),
    )
