"""Advantages of rollouts, by verl's estimators. Statistics are over rollouts, never over rows, so that a rollout of several rows
counts once."""

from __future__ import annotations

import numpy as np
import torch

from raylight.learner import verl_api
from raylight.learner.batch import TrainBatch
from raylight.learner.settings import PolicySettings


def rollout_advantages(batch: TrainBatch, settings: PolicySettings) -> list[float]:
    """One advantage per rollout.

    Each rollout stands before the estimator as a response of a single token, so that an outcome estimator of verl (GRPO:
    https://arxiv.org/abs/2402.03300) sees exactly one score for each.
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
    return advantages[:, 0].tolist()
