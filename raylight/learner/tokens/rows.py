"""Conversion of a rank's shard to `TrainRow` tensors, with the rewards and masks of its tokens."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from raylight.errors import ConfigError
from raylight.experience.batches.shards import MinibatchShard, PackedRows
from raylight.experience.batches.token_records import RowRecord
from raylight.types import LogprobArray, PenalisedRange, PlacedImage, TokenSets


@dataclass(eq=False)
class TrainRow:
    """One trajectory as tensors, split before its first trained token, or before an earlier observation
    that is learned.

    All tensors except `prompt` have one entry per token of `response`, which also contains observations (mask
    0).
    """

    index: int
    """Index in the batch."""
    rollout: int
    """Index of the rollout that the row belongs to."""
    prompt: torch.Tensor
    response: torch.Tensor
    mask: torch.Tensor
    engine_logprobs: torch.Tensor
    versions: torch.Tensor
    """Weight version that sampled each token; -1 for observations."""
    temperature: float
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    """Targets of the critic."""
    old_logprobs: torch.Tensor | None = None
    """Log-probs of the old policy: the learner's, or the engine's in bypass mode."""
    learner_logprobs: torch.Tensor | None = None
    """The learner's log-probs before the update, if `old_logprobs` are not. Without a pass before the update
    they come from the first optimizer step, and other mini-batches have none."""
    ref_logprobs: torch.Tensor | None = None
    teacher: int = 0
    """Number of its teacher on the learners' ranks."""
    teacher_logprobs: torch.Tensor | None = None
    candidates: TokenSets | None = None
    """Tokens that could have been sampled at each position of the response; None: nothing was excluded."""
    penalised: tuple[PenalisedRange, ...] = ()
    """Ranges of the row's tokens that were sampled with penalties."""
    images: tuple[PlacedImage, ...] = ()
    """Images among its tokens, in order."""
    teacher_top_ids: torch.Tensor | None = None
    """The teacher's most probable tokens, shape (tokens, k)."""
    teacher_top_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    sum_pi_squared: torch.Tensor | None = None
    """Sums over the vocabulary of the old policy's squared probabilities."""
    weights: torch.Tensor | None = None
    """Importance weights."""
    proximal_fractions: torch.Tensor | None = None
    """Place of an interpolated proximal policy between the engine's (0) and the trained one (1)."""
    observed: torch.Tensor | None = None
    """1 for tokens that the environment returned; None if the update does not learn them."""
    routes: torch.Tensor | None = None
    """Experts that its first tokens were sent to, shape (tokens, layers of experts, experts of a token)."""
    rollout_fraction: float = 1.0
    """Fraction of the rollout's sampled tokens that are in this row."""

    @property
    def tokens(self) -> int:
        """Length of prompt and response."""
        return len(self.prompt) + len(self.response)


def build_rows(packed: PackedRows, owners: Sequence[int]) -> dict[int, TrainRow]:
    """Convert rows to tensors; return them by their index in the batch.

    Args:
        owners: rollout of each row of the batch.
    """
    lengths, none = packed.response_lengths, [None] * len(packed.indices)

    def split(values: object, dtype: torch.dtype) -> Sequence[torch.Tensor | None]:
        return none if values is None else _split(values, dtype, lengths)

    starts = packed.prompt_lengths
    tokens = _split(packed.token_ids, torch.long, map(operator.add, starts, lengths))
    tops = packed.teacher_tops
    columns = {
        "index": packed.indices,
        "rollout": [int(owners[index]) for index in packed.indices],
        "prompt": [row[:start] for row, start in zip(tokens, starts, strict=True)],
        "response": [row[start:] for row, start in zip(tokens, starts, strict=True)],
        "mask": split(packed.mask, torch.long),
        "engine_logprobs": split(packed.logprobs, torch.float32),
        "versions": split(packed.weight_versions, torch.long),
        "temperature": packed.temperatures,
        "teacher": packed.teachers,
        "teacher_logprobs": split(packed.teacher_logprobs, torch.float32),
        "candidates": _split_sets(packed.candidates, lengths),
        "penalised": packed.penalised,
        "images": packed.images,
        "observed": split(packed.observed, torch.long),
        "routes": _split_routes(packed),
        "teacher_top_ids": split(None if tops is None else tops.ids, torch.long),
        "teacher_top_logprobs": split(None if tops is None else tops.logprobs, torch.float32),
    }
    rows = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
    return {index: TrainRow(**fields) for index, fields in zip(packed.indices, rows, strict=True)}


def _split_sets(joined: TokenSets, lengths: list[int]) -> list[TokenSets | None]:
    if not len(joined):
        return [None] * len(lengths)
    return [part if len(part.values) else None for part in joined.split(lengths)]


def _split(values: object, dtype: torch.dtype, lengths: Iterable[int]) -> tuple[torch.Tensor, ...]:
    return torch.tensor(values, dtype=dtype).split(list(lengths))


def _split_routes(packed: PackedRows) -> list[torch.Tensor | None]:
    if packed.routed_experts is None:
        return [None] * len(packed.indices)
    routes = torch.from_numpy(packed.routed_experts.astype(np.int16)).split(packed.routed)
    return [part if len(part) else None for part in routes]


class Minibatch(NamedTuple):
    """A rank's rows of one mini-batch."""

    rows: list[TrainRow]
    rollouts: int
    """Rollouts of the mini-batch on all ranks."""


def build_minibatches(rows: Mapping[int, TrainRow], shards: Iterable[MinibatchShard]) -> list[Minibatch]:
    """Return a rank's mini-batches. A row that is padding is copied, with an empty mask."""
    return [
        Minibatch([mask_all(rows[i]) if shard.is_padding else rows[i] for i in shard.rows], shard.rollouts)
        for shard in shards
    ]


def mask_all(row: TrainRow) -> TrainRow:
    """Return a copy of a row without sampled tokens and observations."""
    none = torch.zeros_like(row.mask)
    return replace(row, mask=none, observed=None if row.observed is None else none)


def check_routes(rows: Iterable[TrainRow]) -> None:
    """Check that all rows have routes.

    Raises:
        ConfigError: one has none.
    """
    if missing := [row.index for row in rows if row.routes is None]:
        raise ConfigError(
            f"learner.router_replay: row {missing[0]} has no routes, because a call of it was recorded "
            "without them; start fresh in another output_dir, or set learner.router_replay=False"
        )


def make_probe_row(ids: Sequence[int]) -> TrainRow:
    """Make a row at temperature 1 whose response is all tokens but the first."""
    tokens, length = torch.tensor(ids), len(ids) - 1
    ones, zeros = torch.ones(length, dtype=torch.long), torch.zeros(length)
    return TrainRow(0, 0, tokens[:1], tokens[1:], ones, zeros, ones, 1.0)


def record_row(row: TrainRow, bypass_mode: bool) -> RowRecord:
    """Return what an update computed of a row, whose old log-probs are the engine's in bypass mode."""
    old = None if bypass_mode else row.old_logprobs
    logprobs = old if row.learner_logprobs is None else row.learner_logprobs
    known = torch.full_like(row.engine_logprobs, torch.nan) if logprobs is None else logprobs
    assert row.advantages is not None, "an update computes them"
    advantages = row.advantages.masked_fill(row.mask == 0, torch.nan)
    return RowRecord(row.index, len(row.prompt), _copy(known), _copy(advantages))


def _copy(values: torch.Tensor) -> LogprobArray:
    return values.detach().to("cpu", torch.float32, copy=True).numpy()
