"""Metrics of all ranks, under raylight's names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np
import torch

from raylight.learner import verl_api as verl
from raylight.learner.tokens.micro_batch import MicroBatch

POLICY_NAMES = {
    "grad_norm": "learner/grad_norm",
    "actor/pg_loss": "learner/pg_loss",
    "actor/entropy_loss": "learner/entropy",
    "actor/ppo_kl": "learner/ppo_kl",
    "actor/pg_clipfrac": "learner/clip_fraction",
    "kl_loss": "learner/kl",
    "router_aux_loss": "learner/router_aux_loss",
    "observation_loss": "learner/observation_loss",
    "divergence": "learner/divergence",
}
CRITIC_NAMES = {
    "grad_norm": "critic/grad_norm",
    "critic/vf_loss": "critic/vf_loss",
    "critic/vf_clipfrac": "critic/vf_clipfrac",
    "critic/vpred_mean": "critic/vpred_mean",
}

STEP_COUNTS = ("learner/skipped_steps", "critic/skipped_steps")
"""Metrics that count steps, and are summed over steps rather than averaged."""


def mean_over_tokens(value: float | torch.Tensor, batch: MicroBatch) -> verl.Metric:
    """Return a micro-batch's part of the mean over the mini-batch's sampled tokens, on all ranks.

    Args:
        value: of each token, shape (rows, tokens), or the mean over the micro-batch's own sampled tokens.
    """
    total = torch.where(batch.mask, value, 0.0).sum(dtype=torch.float64)
    return verl.Metric("sum", total * (batch.dp_size / max(batch.tokens, 1)))


def rename_metrics(metrics: Mapping[str, float], names: Mapping[str, str] = POLICY_NAMES) -> dict[str, float]:
    """Return verl's metrics under raylight's names; metrics without a name here are dropped."""
    return {ours: metrics[theirs] for theirs, ours in names.items() if theirs in metrics}


def all_reduce_metrics(metrics: Mapping[str, verl.Metric | list[float] | float]) -> dict[str, float]:
    """Reduce verl's metrics to numbers: aggregates of `Metric`, means of lists, averaged over ranks."""
    local = {}
    for name, value in metrics.items():
        if isinstance(value, verl.Metric):
            value = value.aggregate()
        elif isinstance(value, Iterable) and not isinstance(value, torch.Tensor):
            value = float(np.mean([float(v) for v in value]))
        local[name] = float(value)
    names = sorted(local)
    values = torch.tensor([local[name] for name in names], dtype=torch.float64)
    torch.distributed.all_reduce(values)
    return dict(zip(names, (values / torch.distributed.get_world_size()).tolist(), strict=True))


def mean_over_steps(steps: list[dict[str, float]]) -> dict[str, float]:
    """Average each metric over the optimizer steps that have it, and sum `STEP_COUNTS`.

    Non-finite values, such as the gradient norm of a skipped step, are left out of a mean unless all are
    non-finite.
    """
    means = {}
    for name in sorted({name for step in steps for name in step}):
        values = [step[name] for step in steps if name in step]
        finite = [value for value in values if math.isfinite(value)]
        means[name] = math.fsum(values) if name in STEP_COUNTS else float(np.mean(finite or values))
    return means
