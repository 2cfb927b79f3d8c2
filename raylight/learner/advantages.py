"""Advantages of rollouts, by verl's estimators. Statistics are over rollouts, never over rows, so that a rollout of several rows
counts once.

A rollout stands before an estimator as one sequence: all its sampled tokens, row after row. Its reward is on the last of them.
"""

from __future__ import annotations

import numpy as np
import torch

from raylight.learner import verl_api
from raylight.learner.batch import TrainBatch
from raylight.learner.rows import Row
from raylight.learner.settings import PolicySettings


class KlController:
    """The weight of the KL divergence in the reward."""

    def __init__(self, settings: PolicySettings) -> None:
        self.coef = settings.kl_reward_coef


def add_advantages(
    batch: TrainBatch, rows: list[Row], mine: list[Row], settings: PolicySettings, kl: KlController
) -> dict[str, float]:
    """Set the rows' `advantages` and `returns`; returns metrics, the same on all ranks. A collective.

    Args:
        rows: all of the batch.
        mine: this rank's; these have what was computed of them. Some may be copies that train nothing.
    """
    estimator = verl_api.get_adv_estimator_fn(settings.adv_estimator)
    rewards = torch.tensor(batch.rewards, dtype=torch.float32)[:, None]
    advantages, _ = estimator(
        token_level_rewards=rewards,
        response_mask=torch.ones_like(rewards),
        index=np.array(batch.groups, dtype=object),
        norm_adv_by_std_in_grpo=settings.norm_adv_by_std,
        config=verl_api.AlgoConfig(),
    )
    for row in [*rows, *mine]:
        row.advantages = torch.full((len(row.response),), float(advantages[row.rollout, 0]))
    return {"learner/advantage_abs_mean": float(advantages.abs().mean())}
