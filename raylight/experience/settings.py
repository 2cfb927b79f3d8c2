"""What an algorithm tells the learners. Field names follow verl where verl has the concept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PrivateAttr, model_validator

from raylight.config import Config
from raylight.experience.registry import BaselineKind, find_estimator, find_loss, takes_values, traits_of
from raylight.experience.thresholds import check_rejection, weight_bounds

Share = Annotated[float, Field(ge=0, lt=1)]
KlType = Literal["k1", "k2", "k3"]
"""Estimators of the KL divergence, http://joschu.net/blog/kl-approx.html."""
LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]


class OptimizerSettings(Config):
    """AdamW and its learning rate."""

    lr: float = Field(default=1e-6, gt=0, allow_inf_nan=False)
    lr_schedule: Literal["constant", "cosine"] = "constant"
    lr_warmup_steps: int = Field(default=0, ge=0)
    """Updates over which the learning rate rises from 0; the first of them changes nothing."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Where the cosine ends, as a share of `lr`."""
    weight_decay: float = Field(default=0.01, ge=0, allow_inf_nan=False)
    betas: tuple[Share, Share] = (0.9, 0.999)
    grad_clip: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.min_lr_ratio and self.lr_schedule == "constant":
            raise ValueError("min_lr_ratio is where a cosine ends, and lr_schedule is 'constant'")
        return self


class CriticSettings(OptimizerSettings):
    """A critic, of the policy's architecture with a head of one value per token (PPO)."""

    model: str | None = None
    """Folder of the model it begins as; None: the policy's."""
    lr: float = Field(default=1e-5, gt=0, allow_inf_nan=False)
    warmup_steps: int = Field(default=0, ge=0)
    """Updates in which only the critic is trained."""
    mini_batches: int = Field(default=1, ge=1)
    ppo_epochs: int = Field(default=1, ge=1)
    cliprange_value: float = Field(default=0.5, gt=0)
    loss_agg_mode: LossAggregation = "token-mean"


class CorrectionSettings(Config):
    """What is done about the difference between the policy that sampled and the one that is trained
    (https://richardli.xyz/rl-collapse; verl's rollout correction)."""

    rollout_is: Literal["token", "sequence"] | None = None
    """Weigh tokens by the ratio of learner to engine probability, of each token or of the whole row; None does not."""
    rollout_is_threshold: float | str = 2.0
    """A number truncates the weights (TIS); "lower_upper", as in "0.5_5.0", zeroes those outside (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the batch, so that only what they say of tokens against one another counts."""
    rollout_rs: str | None = None
    """Leave out tokens or rows whose ratio is too far from 1: `token_k1`, `seq_mean_k1` (geometric), `seq_max_k2`, ..., several
    by comma."""
    rollout_rs_threshold: float | str | None = None
    """How far: for names in k1 bounds of the ratio of engine to learner, "lower_upper" or one number x for "1/x_x"; for those in k2
    and k3 the largest divergence. One for all, or one for each by comma."""
    bypass_mode: bool = False
    """Take the engine's log-probs for those of the old policy, instead of computing them (two policies instead of three)."""
    warn_logprob_mismatch: float = Field(default=0.0, ge=0)
    """Difference of engine and learner log-probs for tokens of the current version from which a warning is given; 0: a tenth of
    `max_logprob_mismatch`."""
    max_logprob_mismatch: float = Field(default=0.0, ge=0)
    """Largest allowed difference; 0 chooses 1e-3 where both compute in float32, and 0.5 otherwise."""

    @property
    def corrects(self) -> bool:
        """Whether it changes the update, rather than only being measured."""
        return self.rollout_is is not None or self.rollout_rs is not None

    @property
    def warns_from(self) -> float:
        """The difference of log-probs above which a warning is given."""
        return self.warn_logprob_mismatch or self.max_logprob_mismatch / 10

    @model_validator(mode="after")
    def _correction_fits(self) -> Self:
        weight_bounds(self.rollout_is_threshold)
        if self.rollout_is is None and (self.rollout_is_threshold != 2.0 or self.rollout_is_batch_normalize):
            raise ValueError(
                "rollout_is_threshold and rollout_is_batch_normalize do nothing without rollout_is"
            )
        if (self.rollout_rs is None) != (self.rollout_rs_threshold is None):
            raise ValueError("rollout_rs and rollout_rs_threshold need each other")
        if self.rollout_rs is not None and self.rollout_rs_threshold is not None:
            check_rejection(self.rollout_rs, self.rollout_rs_threshold)
        if 0 < self.max_logprob_mismatch < self.warn_logprob_mismatch:
            raise ValueError("warn_logprob_mismatch is above max_logprob_mismatch, which is an error already")
        return self


class PolicySettings(OptimizerSettings, CorrectionSettings):
    """How a batch becomes an update of the policy."""

    adv_estimator: str = "grpo"
    """A name registered with `verl.trainer.ppo.core_algos`, or by `raylight.advantage_estimator`."""
    norm_adv_by_std: bool = True
    """Divide advantages by the group's standard deviation (GRPO); False is Dr.GRPO, https://arxiv.org/abs/2503.20783."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from a sampled token to the next."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Of generalised advantage estimation, https://arxiv.org/abs/1506.02438."""
    critic: CriticSettings | None = None
    loss_mode: str = "vanilla"
    """A policy loss registered with verl, or by `raylight.policy_loss`; `vanilla` is PPO's clipped objective."""
    loss_agg_mode: LossAggregation = "token-mean"
    loss_scale_factor: int | None = Field(default=None, ge=1)
    """By what seq-mean-token-sum-norm divides; None: by the longest response of a micro-batch."""
    clip_ratio_low: float = Field(default=0.2, ge=0)
    clip_ratio_high: float = Field(default=0.2, ge=0)
    clip_ratio_c: float = Field(default=3.0, gt=1)
    """Bound of the objective where the advantage is negative (dual clip, https://arxiv.org/abs/1912.09729)."""
    clip_cov_ratio: float = Field(default=0.0002, ge=0, le=1)
    clip_cov_lb: float = 1.0
    clip_cov_ub: float = 5.0
    kl_cov_ratio: float = Field(default=0.0002, ge=0, le=1)
    ppo_kl_coef: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    """The five of Clip-Cov and KL-Cov, https://arxiv.org/abs/2505.22617."""
    tau_pos: float = Field(default=1.0, gt=0)
    tau_neg: float = Field(default=1.05, gt=0)
    """Temperatures of SAPO, https://arxiv.org/abs/2511.20347."""
    kl_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the KL divergence to the starting policy in the loss; 0 needs no reference model."""
    kl_type: KlType = "k3"
    kl_reward_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of that divergence, taken off the reward of each token."""
    kl_reward_type: KlType = "k1"
    kl_target: float | None = Field(default=None, gt=0)
    """Where the adaptive controller (https://arxiv.org/abs/1909.08593) steers the divergence by changing `kl_reward_coef`; None
    leaves that as it is."""
    kl_horizon: int = Field(default=10_000, ge=1)
    entropy_coef: float = Field(default=0.0, allow_inf_nan=False)
    calculate_entropy: bool = True
    """Compute the entropy for the metrics too where the loss has no need of it."""
    zero_variance_groups: Literal["keep", "drop"] = "keep"
    """Groups whose rewards are all equal: trained with advantages of 0 (their tokens count in the mean), or left out."""
    mini_batches: int = Field(default=1, ge=1)
    """Parts that a batch is dealt into by rollouts; an optimizer step each."""
    ppo_epochs: int = Field(default=1, ge=1)
    """Passes over a batch."""

    _estimator: Callable[..., Any] | None = PrivateAttr(default=None)
    _baseline_kind: BaselineKind = PrivateAttr(default="none")
    _loss: Callable[..., Any] | None = PrivateAttr(default=None)

    def model_post_init(self, context: Any) -> None:
        """Take along the user's functions that are named: the ranks, in other processes, do not have them."""
        self._estimator, self._loss = find_estimator(self.adv_estimator), find_loss(self.loss_mode)
        self._baseline_kind = traits_of(self.adv_estimator).baseline_kind

    @property
    def own_estimator(self) -> Callable[..., Any] | None:
        """The user's estimator; None for one of verl's."""
        return self._estimator

    @property
    def own_loss(self) -> Callable[..., Any] | None:
        """The user's loss; None for one of verl's."""
        return self._loss

    @property
    def baseline_kind(self) -> BaselineKind:
        """Baseline that the estimator compares a rollout with."""
        return self._baseline_kind

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if takes_values(self.adv_estimator, self._estimator) != (self.critic is not None):
            raise ValueError(
                "adv_estimator 'gae' (or one of your own that takes values) and a critic need each other"
            )
        if self.kl_target is not None and not self.kl_reward_coef:
            raise ValueError("kl_target steers kl_reward_coef, which is 0")
        if self.bypass_mode and self.corrects:
            raise ValueError(
                "in bypass_mode the ratio of the loss is that to the engine already; leave rollout_is and rollout_rs"
            )
        return self

    @property
    def updates_per_batch(self) -> int:
        return self.mini_batches * self.ppo_epochs

    @property
    def needs_reference(self) -> bool:
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """Whether the policy's log-probs are needed before the pass that trains: where that is the only one, they are its own."""
        return not self.bypass_mode and (
            self.updates_per_batch > 1 or self.kl_reward_coef > 0 or self.corrects
        )
