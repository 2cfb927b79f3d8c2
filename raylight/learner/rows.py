"""Rows of a batch as tensors, split into mini-batches by rollout and sharded across ranks by token count."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from raylight.config import LearnerConfig
from raylight.experience.batch import TrainBatch
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
}
"""Optional field of a row -> verl's name for it. verl receives the fields that all rows have."""


def build_rows(batch: TrainBatch) -> list[TrainRow]:
    """Convert the trajectories of a batch to tensors."""
    rows = []
    for index, (trajectory, owner) in enumerate(zip(batch.rows, batch.owners, strict=True)):
        start = trajectory.prompt_length
        tokens = torch.tensor(trajectory.token_ids, dtype=torch.long)
        rows.append(
            TrainRow(
                index=index,
                rollout=owner,
                prompt=tokens[:start],
                response=tokens[start:],
                mask=torch.tensor(trajectory.mask[start:], dtype=torch.long),
                engine_logprobs=torch.tensor(trajectory.logprobs[start:]),
                versions=torch.tensor(trajectory.weight_versions[start:]),
                temperature=trajectory.temperature,
            )
        )
    return rows


def make_probe_row(ids: Sequence[int]) -> TrainRow:
    """Make a row at temperature 1 whose response is all tokens but the first."""
    tokens, length = torch.tensor(ids), len(ids) - 1
    ones, zeros = torch.ones(length, dtype=torch.long), torch.zeros(length)
    return TrainRow(0, 0, tokens[:1], tokens[1:], ones, zeros, ones, 1.0)


def split_minibatches(rows: list[TrainRow], parts: int) -> list[list[TrainRow]]:
    """Split rows into mini-batches of nearly equally many rollouts.

    The rows of a rollout stay together. With fewer rollouts than `parts`, there are fewer mini-batches.
    """
    rollouts = sorted({row.rollout for row in rows})
    parts = min(parts, len(rollouts))
    part_of = {rollout: i % parts for i, rollout in enumerate(rollouts)}
    return [[row for row in rows if part_of[row.rollout] == part] for part in range(parts)]


def shard_for_rank(rows: list[TrainRow], rank: int, ranks: int) -> list[TrainRow]:
    """Return this rank's rows, balanced by token count.

    With fewer rows than ranks, the remaining ranks get copies with an empty mask, which do not affect the
    loss.
    """
    padding = [replace(rows[0], mask=torch.zeros_like(rows[0].mask)) for _ in range(ranks - len(rows))]
    rows = rows + padding
    if ranks == 1:
        return rows
    shard = verl.get_seqlen_balanced_partitions([row.tokens for row in rows], ranks, equal_size=False)[rank]
    return [rows[i] for i in shard]


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
