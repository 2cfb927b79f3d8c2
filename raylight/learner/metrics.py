"""Metrics of all ranks together, under raylight's names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from raylight.learner import verl_api as verl

NAMES = {
    "grad_norm": "learner/grad_norm",
    "actor/pg_loss": "learner/pg_loss",
    "actor/entropy_loss": "learner/entropy",
    "actor/ppo_kl": "learner/ppo_kl",
    "actor/pg_clipfrac": "learner/clip_fraction",
    "kl_loss": "learner/kl",
}
CRITIC_NAMES = {
    "grad_norm": "critic/grad_norm",
    "critic/vf_loss": "critic/vf_loss",
    "critic/vf_clipfrac": "critic/vf_clipfrac",
    "critic/vpred_mean": "critic/vpred_mean",
}

COUNTED = ("learner/skipped_steps", "critic/skipped_steps")
"""Metrics that are counts of steps."""


def rename_metrics(metrics: Mapping[str, float], names: Mapping[str, str] = NAMES) -> dict[str, float]:
    """verl's metrics under our names; the others are not shown."""
    return {ours: metrics[theirs] for theirs, ours in names.items() if theirs in metrics}


def all_reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """verl's metrics as numbers: what a Metric says of itself, the mean of a list, averaged over ranks."""
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
    """What several optimizer steps come to: the mean of each metric over those that have it, and the sum of what is counted. The
    gradient of a step that was skipped counts in no mean, unless all were."""
    names = {name for step in steps for name in step}
    found = {}
    for name in sorted(names):
        values = [step[name] for step in steps if name in step]
        finite = [value for value in values if math.isfinite(value)]
        found[name] = math.fsum(values) if name in COUNTED else float(np.mean(finite or values))
    return found
