"""What an algorithm tells the learners. Field names follow verl where verl has the concept."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from raylight.config import Config


class PolicySettings(Config):
    """How a batch becomes an update of the policy."""

    adv_estimator: Literal["grpo"] = "grpo"
    """A name registered with `verl.trainer.ppo.core_algos`."""
    norm_adv_by_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); False is Dr.GRPO, https://arxiv.org/abs/2503.20783."""
    loss_mode: Literal["vanilla"] = "vanilla"
    """A policy loss registered with verl; `vanilla` is PPO's clipped objective."""
    loss_agg_mode: Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"] = "token-mean"
    clip_ratio_low: float = Field(default=0.2, ge=0)
    clip_ratio_high: float = Field(default=0.2, ge=0)
    kl_coef: float = Field(default=0.0, ge=0)
    """Weight of the KL divergence to the starting policy in the loss; 0 needs no reference model."""
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence, http://joschu.net/blog/kl-approx.html."""
    entropy_coef: float = Field(default=0.0, allow_inf_nan=False)
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps per batch."""
    lr: float = Field(default=1e-6, gt=0)
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises from 0; the first of them changes nothing."""
    weight_decay: float = Field(default=0.01, ge=0)
    grad_clip: float = Field(default=1.0, gt=0)
    max_logprob_mismatch: float = Field(default=0.0, ge=0)
    """Largest allowed difference of engine and learner log-probs for tokens of the current version; 0 chooses 1e-3 where both
    compute in float32, and 0.5 otherwise."""
