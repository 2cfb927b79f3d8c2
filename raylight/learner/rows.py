"""A rank's rows as tensors, and the input of the training engine that they become."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from raylight.config import LearnerConfig
from raylight.experience.shards import MinibatchShard, PackedRows
from raylight.learner import verl_api as verl


@dataclass(eq=False)
class TrainRow:
    """One trajectory as tensors, split before its first trained token.

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
    they are those of the first training pass."""
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    """Importance weights."""
    proximal_fractions: torch.Tensor | None = None
    """Place of an interpolated proximal policy between the engine's (0) and the trained one (1)."""
    rollout_fraction: float = 1.0
    """Fraction of the rollout's sampled tokens that are in this row."""

    @property
    def tokens(self) -> int:
        """Length of prompt and response."""
        return len(self.prompt) + len(self.response)


VERL_NAMES = {
    "old_logprobs": "old_log_probs",
    "ref_logprobs": "ref_log_prob",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "weights": "rollout_is_weights",
    "engine_logprobs": "rollout_log_probs",
    "proximal_fractions": "proximal_fractions",
}
"""Optional field of a row -> verl's name for it. verl receives the fields that all rows have."""


def build_rows(packed: PackedRows, owners: Sequence[int]) -> dict[int, TrainRow]:
    """Convert rows to tensors; return them by their index in the batch.

    Args:
        owners: rollout of each row of the batch.
    """
    lengths = packed.response_lengths
    fields = (
        packed.indices,
        packed.temperatures,
        packed.prompt_lengths,
        _split(packed.token_ids, torch.long, map(operator.add, packed.prompt_lengths, lengths)),
        _split(packed.mask, torch.long, lengths),
        _split(packed.logprobs, torch.float32, lengths),
        _split(packed.weight_versions, torch.long, lengths),
    )
    return {
        index: TrainRow(
            index=index,
            rollout=int(owners[index]),
            prompt=tokens[:start],
            response=tokens[start:],
            mask=mask,
            engine_logprobs=logprobs,
            versions=versions,
            temperature=temperature,
        )
        for index, temperature, start, tokens, mask, logprobs, versions in zip(*fields, strict=True)
    }


def _split(values: Any, dtype: torch.dtype, lengths: Iterable[int]) -> tuple[torch.Tensor, ...]:
    return torch.tensor(values, dtype=dtype).split(list(lengths))


class Minibatch(NamedTuple):
    """A rank's rows of one mini-batch."""

    rows: list[TrainRow]
    rollouts: int
    """Rollouts of the mini-batch on all ranks."""


def build_minibatches(rows: Mapping[int, TrainRow], shards: Iterable[MinibatchShard]) -> list[Minibatch]:
    """Return a rank's mini-batches. A row that is padding is copied, with an empty mask."""
    return [
        Minibatch([_pad_with(rows[i]) if shard.is_padding else rows[i] for i in shard.rows], shard.rollouts)
        for shard in shards
    ]


def _pad_with(row: TrainRow) -> TrainRow:
    return replace(row, mask=torch.zeros_like(row.mask))


def make_probe_row(ids: Sequence[int]) -> TrainRow:
    """Make a row at temperature 1 whose response is all tokens but the first."""
    tokens, length = torch.tensor(ids), len(ids) - 1
    ones, zeros = torch.ones(length, dtype=torch.long), torch.zeros(length)
    return TrainRow(0, 0, tokens[:1], tokens[1:], ones, zeros, ones, 1.0)


def to_tensordict(rows: list[TrainRow], config: LearnerConfig, *, global_rollouts: int, entropy: bool) -> Any:
    """Build verl's input of `infer_batch` and `train_batch`, with nested tensors of shape (rows, tokens).

    Args:
        global_rollouts: rollouts of the mini-batch on all ranks, the divisor of means over sequences.
        entropy: compute the entropy of the policy too.
    """
    tensors: dict[str, Any] = {
        "input_ids": _to_nested([torch.cat([row.prompt, row.response]) for row in rows]),
        "position_ids": _to_nested([torch.arange(row.tokens) for row in rows]),
        "prompts": _to_nested([row.prompt for row in rows]),
        "responses": _to_nested([row.response for row in rows]),
        "response_mask": _to_nested([row.mask for row in rows]),
        "loss_mask": _to_nested([torch.cat([torch.zeros_like(row.prompt), row.mask]) for row in rows]),
        "temperature": torch.tensor([row.temperature for row in rows]),
        "row": torch.arange(len(rows)),
        "rollout_fraction": torch.tensor([row.rollout_fraction for row in rows]),
    }
    for name, verl_name in VERL_NAMES.items():
        if all(getattr(row, name) is not None for row in rows):
            tensors[verl_name] = _to_nested([getattr(row, name) for row in rows])
    options = {
        "use_remove_padding": config.packed,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": config.max_tokens_per_micro_batch,
        "global_batch_size": global_rollouts,
        "calculate_entropy": entropy,
        "pad_token_id": 0,
    }
    return verl.tensordict_utils.get_tensordict(tensors, non_tensor_dict=options)


def _to_nested(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Build a jagged nested tensor, much faster than `torch.nested.nested_tensor(list)`."""
    lengths = [len(tensor) for tensor in tensors]
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(list(tensors)),
        torch.tensor([0, *itertools.accumulate(lengths)]),
        min_seqlen=min(lengths),
        max_seqlen=max(lengths),
    )
