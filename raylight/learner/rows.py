"""Rows of a batch as tensors, dealt to ranks by tokens."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch

from raylight.config import LearnerConfig
from raylight.learner import verl_api as verl
from raylight.learner.batch import TrainBatch

_nested = functools.partial(torch.nested.as_nested_tensor, layout=torch.jagged)


@dataclass
class Row:
    """One trajectory as tensors, split where its first trained token is.

    `mask`, `engine_logprobs`, `versions`, `old_logprobs` and `ref_logprobs` have one entry per token of `response`, which also
    holds observations (mask 0).
    """

    prompt: torch.Tensor
    response: torch.Tensor
    mask: torch.Tensor
    engine_logprobs: torch.Tensor
    versions: torch.Tensor
    advantage: float
    temperature: float
    old_logprobs: torch.Tensor | None = None
    ref_logprobs: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return len(self.prompt) + len(self.response)

    def mismatch(self, version: int) -> torch.Tensor:
        """Absolute log-prob differences of this row's sampled tokens of `version`."""
        assert self.old_logprobs is not None
        chosen = (self.mask == 1) & (self.versions == version)
        return (self.old_logprobs - self.engine_logprobs)[chosen].abs()


def rows_of(batch: TrainBatch, advantages: list[float]) -> list[Row]:
    """Tensors of every trajectory of the batch, each with its rollout's advantage."""
    rows = []
    for trajectory, owner in zip(batch.rows, batch.owners, strict=True):
        cut = trajectory.prompt_length
        tokens = torch.tensor(trajectory.token_ids)
        rows.append(
            Row(
                prompt=tokens[:cut], response=tokens[cut:], mask=torch.tensor(trajectory.mask[cut:]),
                engine_logprobs=torch.tensor(trajectory.logprobs[cut:]), versions=torch.tensor(trajectory.weight_versions[cut:]),
                advantage=advantages[owner], temperature=trajectory.temperature,
            )
        )  # fmt: skip
    return rows


def share_of_rank(rows: list[Row], rank: int, ranks: int) -> list[Row]:
    """This rank's rows, balanced by tokens. With fewer rows than ranks the missing ones are copies that train nothing."""
    padding = [replace(rows[0], mask=torch.zeros_like(rows[0].mask)) for _ in range(ranks - len(rows))]
    rows = rows + padding
    if ranks == 1:
        return rows
    chosen = verl.get_seqlen_balanced_partitions([row.tokens for row in rows], ranks, equal_size=False)[rank]
    return [rows[i] for i in chosen]


def to_tensordict(rows: list[Row], config: LearnerConfig, *, global_rows: int, entropy: bool) -> Any:
    """verl's input for `infer_batch` and `train_batch`; nested tensors of shape (rows, tokens of the row).

    Args:
        global_rows: rows of the mini-batch on all ranks together.
        entropy: whether to compute the policy's entropy too.
    """
    tensors: dict[str, Any] = {
        "input_ids": _nested([torch.cat([row.prompt, row.response]) for row in rows]),
        "position_ids": _nested([torch.arange(row.tokens) for row in rows]),
        "prompts": _nested([row.prompt for row in rows]),
        "responses": _nested([row.response for row in rows]),
        "response_mask": _nested([row.mask for row in rows]),
        "loss_mask": _nested([torch.cat([torch.zeros_like(row.prompt), row.mask]) for row in rows]),
        "advantages": _nested([torch.full((len(row.response),), row.advantage) for row in rows]),
        "temperature": torch.tensor([row.temperature for row in rows]),
    }
    for name, key in (("old_logprobs", "old_log_probs"), ("ref_logprobs", "ref_log_prob")):
        if all(getattr(row, name) is not None for row in rows):
            tensors[key] = _nested([getattr(row, name) for row in rows])
    plain = {
        "use_remove_padding": False, "use_dynamic_bsz": True, "max_token_len_per_gpu": config.max_tokens_per_micro_batch,
        "global_batch_size": global_rows, "calculate_entropy": entropy, "pad_token_id": 0,
    }  # fmt: skip
    return verl.tensordict_utils.get_tensordict(tensors, non_tensor_dict=plain)
