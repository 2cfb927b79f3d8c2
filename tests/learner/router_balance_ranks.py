"""One rank that computes the load-balancing loss of a mixture of experts, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from ranks import ANSWERS, PROMPTS, make_batch
from torch.nn.utils.rnn import pad_sequence

from raylight.config import LearnerConfig
from raylight.experience.batches.shards import shard_batch
from raylight.experience.settings.policy_settings import PolicySettings

COEF = 0.3


def balance(model: str, ranks: int = 1, **config: Any) -> dict[str, float]:
    """Return the loss of all rows and the norm of its gradient, after one step on this loss alone."""
    from raylight.learner.losses.metrics import all_reduce_metrics
    from raylight.learner.tokens.rows import build_minibatches, build_rows
    from raylight.learner.updates.policy import Policy

    settings = PolicySettings(lr=1e-3)
    learner = LearnerConfig(n=ranks, router_aux_loss_coef=COEF, **config)
    policy = Policy(model, learner, settings, 2)
    batch = make_batch([[0.0] * len(answer) for answer in ANSWERS])
    shard = list(shard_batch(batch, settings, ranks))[dist.get_rank()]
    (minibatch,) = build_minibatches(build_rows(shard.rows, shard.outline.owners.tolist()), shard.minibatches)
    metrics = policy.engine.train(minibatch, lambda outputs, _: (0 * outputs["log_probs"].sum(), {}))
    found = all_reduce_metrics(metrics)
    return {"loss": found["router_aux_loss"], "norm": found["grad_norm"]}


def plain_balance(model: str) -> dict[str, float]:
    """Return the same of plain transformers, which is given all rows in one pass."""
    from transformers import AutoModelForCausalLM

    plain: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = [torch.tensor(prompt + answer) for prompt, answer in zip(PROMPTS, ANSWERS, strict=True)]
    mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    ids = pad_sequence(rows, batch_first=True)
    loss = plain(input_ids=ids, attention_mask=mask, output_router_logits=True).aux_loss
    (COEF * loss).backward()
    norms = [param.grad.norm() for param in plain.parameters() if param.grad is not None]
    return {"loss": float(loss), "norm": float(torch.stack(norms).norm())}


def main(rank: int, ranks: int, model: str) -> dict[str, float]:
    """Return what `balance` finds on several ranks."""
    return balance(model, ranks)
