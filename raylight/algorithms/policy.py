"""Algorithms that train a policy on rollouts. Each says only what it is; the loop in `raylight.trainer` runs them all."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raylight.algorithms.base import AnyAlgorithm
from raylight.learner.settings import PolicySettings
from raylight.types import RolloutConfig


class PolicyAlgorithm(PolicySettings, AnyAlgorithm):
    """Settings that every policy-gradient algorithm shares.

    Args:
        model: folder of a Hugging Face model, or the name of one in the local cache.
    """

    model: str
    group_size: int = Field(default=8, ge=1)
    """Rollouts of one task that are compared with one another."""
    tasks_per_step: int = Field(default=16, ge=1)
    n_epochs: int = Field(default=1, ge=1)
    """Passes over the training tasks, unless `n_steps` says how many steps to take."""
    n_steps: int | None = Field(default=None, ge=0)
    val_every: int = Field(default=10, ge=0)
    """Steps between validations; 0 validates only at the end."""
    val_before_train: bool = True
    val_samples: int = Field(default=1, ge=1)
    """Rollouts per validation task."""
    failure_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Reward of a rollout whose agent failed; None leaves it out. Failures of the infrastructure are always left out."""
    max_steps_without_signal: int = Field(default=20, ge=1)
    """Training ends early after so many steps in a row in which no rollout was better than its group."""
    sync_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline for new weights to reach every engine."""
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig(timeout_seconds=600.0))
    """Limits and retries of each rollout."""

    def steps(self, n_train: int) -> int:
        """Steps of the whole run for a training set of `n_train` tasks."""
        if self.n_steps is not None:
            return self.n_steps
        return -(-n_train * self.n_epochs // self.tasks_per_step)


class GRPO(PolicyAlgorithm):
    """Group relative policy optimisation, https://arxiv.org/abs/2402.03300: a rollout's advantage is how much better its reward is
    than the mean of its group, in units of the group's standard deviation; the loss is PPO's clipped objective."""

    adv_estimator: Literal["grpo"] = "grpo"
    group_size: int = Field(default=8, ge=2)
