"""Rows of a batch as tensors: dealt to mini-batches by rollouts, to ranks by tokens."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from raylight.config import LearnerConfig
from raylight.experience.batch import TrainBatch
from raylight.learner import verl_api as verl


def _nested(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Many times as fast as torch's own way from a list."""
    lengths = [len(tensor) for tensor in tensors]
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(list(tensors)),
        torch.tensor([0, *itertools.accumulate(lengths)]),
        min_seqlen=min(lengths),
        max_seqlen=max(lengths),
    )


@dataclass(eq=False)
class TrainRow:
    """One trajectory as tensors, split where its first trained token is.

    All tensors but `prompt` have one entry per token of `response`, which also holds observations (mask 0).
    """

    index: int
    """Its place in the batch."""
    rollout: int
    """The rollout that it is of."""
    prompt: torch.Tensor
    response: torch.Tensor
    mask: torch.Tensor
    engine_logprobs: torch.Tensor
    versions: torch.Tensor
    temperature: float
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    """What the critic learns to tell."""
    old_logprobs: torch.Tensor | None = None
    seen_logprobs: torch.Tensor | None = None
    """What the pass that trained on it first computed, where nothing was computed before."""
    ref_logprobs: torch.Tensor | None = None
    values: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    """Importance weights."""
    share: float = 1.0
    """Of its rollout's sampled tokens, how many are its own."""

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.response)


TENSORS = {
    "old_logprobs": "old_log_probs",
    "ref_logprobs": "ref_log_prob",
    "advantages": "advantages",
    "returns": "returns",
    "values": "values",
    "weights": "rollout_is_weights",
    "engine_logprobs": "rollout_log_probs",
}
"""Fields of a row -> verl's names for them. verl is given those that all rows have."""


def rows_of(batch: TrainBatch) -> list[TrainRow]:
    """Tensors of every trajectory of the batch."""
    rows = []
    for index, (trajectory, owner) in enumerate(zip(batch.rows, batch.owners, strict=True)):
        cut = trajectory.prompt_length
        tokens = torch.tensor(trajectory.token_ids)
        rows.append(
            TrainRow(
                index=index,
                rollout=owner,
                prompt=tokens[:cut],
                response=tokens[cut:],
                mask=torch.tensor(trajectory.mask[cut:]),
                engine_logprobs=torch.tensor(trajectory.logprobs[cut:]),
                versions=torch.tensor(trajectory.weight_versions[cut:]),
                temperature=trajectory.temperature,
            )
        )
    return rows


def probe_row(ids: Sequence[int]) -> TrainRow:
    """A row whose response is all but the first token, at temperature 1."""
    tokens, length = torch.tensor(ids), len(ids) - 1
    ones, zeros = torch.ones(length, dtype=torch.long), torch.zeros(length)
    return TrainRow(0, 0, tokens[:1], tokens[1:], ones, zeros, ones, 1.0)


def split_minibatches(rows: list[TrainRow], parts: int) -> list[list[TrainRow]]:
    """Mini-batches of nearly equally many rollouts, all rows of a rollout in the same; fewer when there are fewer rollouts."""
    rollouts = sorted({row.rollout for row in rows})
    parts = min(parts, len(rollouts))
    part_of = {rollout: i % parts for i, rollout in enumerate(rollouts)}
    return [[row for row in rows if part_of[row.rollout] == part] for part in range(parts)]


def shard_for_rank(rows: list[TrainRow], rank: int, ranks: int) -> list[TrainRow]:
    """This rank's rows, balanced by tokens. With fewer rows than ranks the missing ones are copies that train nothing."""
    padding = [replace(rows[0], mask=torch.zeros_like(rows[0].mask)) for _ in range(ranks - len(rows))]
    rows = rows + padding
    if ranks == 1:
        return rows
    chosen = verl.get_seqlen_balanced_partitions([row.tokens for row in rows], ranks, equal_size=False)[rank]
    return [rows[i] for i in chosen]


def to_tensordict(rows: list[TrainRow], config: LearnerConfig, *, global_rollouts: int, entropy: bool) -> Any:
    """verl's input for `infer_batch` and `train_batch`; nested tensors of shape (rows, tokens of the row).

    Args:
        global_rollouts: rollouts of the mini-batch on all ranks together, over which means of sequences are taken.
        entropy: whether to compute the policy's entropy too.
    """
    tensors: dict[str, Any] = {
        "input_ids": _nested([torch.cat([row.prompt, row.response]) for row in rows]),
        "position_ids": _nested([torch.arange(row.tokens) for row in rows]),
        "prompts": _nested([row.prompt for row in rows]),
        "responses": _nested([row.response for row in rows]),
        "response_mask": _nested([row.mask for row in rows]),
        "loss_mask": _nested([torch.cat([torch.zeros_like(row.prompt), row.mask]) for row in rows]),
        "temperature": torch.tensor([row.temperature for row in rows]),
        "row": torch.arange(len(rows)),
        "share": torch.tensor([row.share for row in rows]),
    }
    for name, key in TENSORS.items():
        if all(getattr(row, name) is not None for row in rows):
            tensors[key] = _nested([getattr(row, name) for row in rows])
    plain = {
        "use_remove_padding": config.packed,
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": config.max_tokens_per_micro_batch,
        "global_batch_size": global_rollouts,
        "calculate_entropy": entropy,
        "pad_token_id": 0,
    }
    return verl.tensordict_utils.get_tensordict(tensors, non_tensor_dict=plain)
