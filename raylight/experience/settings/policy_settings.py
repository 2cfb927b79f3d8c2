"""Settings of a policy update, which the driver sends to the learners. Names follow verl where it has
them."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from raylight._utils.bounds import MAX_COUNT, MAX_FACTOR, MAX_SAMPLES
from raylight.base_config import Config
from raylight.errors import ConfigError
from raylight.experience.settings import advantages, losses
from raylight.experience.settings.advantages import ADVANTAGES, AnyAdvantage, BaselineKind, DivergenceKind
from raylight.experience.settings.correction_settings import CorrectionSettings
from raylight.experience.settings.losses import LOSSES, AnyLoss
from raylight.types import JsonObject

DecayRate = Annotated[float, Field(ge=0, lt=1)]
KlType = Literal["k1", "k2", "k3"]
"""Estimators of the KL divergence, http://joschu.net/blog/kl-approx.html."""
LossAggregation = Literal[
    "token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"
]

SCALED_AGGREGATION: LossAggregation = "seq-mean-token-sum-norm"
TABLES = (ADVANTAGES, LOSSES)
"""Settings with variants."""
PREREQUISITES = {
    "kl_type": "kl_coef",
    "kl_reward_type": "kl_reward_coef",
    "kl_horizon": "kl_target",
    "proximal": "max_staleness",
    "stale": "max_staleness",
}
"""Setting -> another setting without which it is not read."""


class OptimizerSettings(Config):
    """Settings of the optimizer and its learning-rate schedule."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw, or muon: torch's Muon (https://arxiv.org/abs/2502.16982) for the matrices of the layers, and
    AdamW for embeddings, output layer, heads and vectors. Its updates are scaled so that `lr` and
    `weight_decay` have the same meaning as for AdamW. It needs a full model, not an adapter."""
    muon_momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum of Muon's matrices."""
    lr: float = Field(default=1e-6, gt=0, le=MAX_FACTOR)
    lr_schedule: Literal["constant", "cosine"] = "constant"
    lr_warmup_steps: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Updates over which the learning rate rises linearly to `lr`; the first has `lr / lr_warmup_steps`."""
    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Final learning rate of the cosine schedule, as a fraction of `lr`."""
    weight_decay: float = Field(default=0.01, ge=0, le=MAX_FACTOR)
    betas: tuple[DecayRate, DecayRate] = (0.9, 0.999)
    grad_clip: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    """Maximum norm of the gradient."""

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        if self.min_lr_ratio and self.lr_schedule == "constant":
            raise ValueError(
                "min_lr_ratio applies to the cosine schedule only, and lr_schedule is 'constant'; set "
                "lr_schedule='cosine'"
            )
        if self.optimizer != "muon" and self.muon_momentum != 0.95:
            raise ValueError("nothing reads muon_momentum with optimizer='adamw'; set optimizer='muon'")
        return self

    def check_adapter(self, adapted: bool) -> None:
        """Raise a ConfigError if the optimizer does not fit a learner that trains an adapter."""
        if adapted and self.optimizer == "muon":
            raise ConfigError(
                "optimizer='muon' makes all directions of a matrix's update equally large, and the matrices "
                "of an adapter (learner.lora) have few; set optimizer='adamw', or train the full model"
            )


class ModelConfig(Config):
    """Settings of one of a run's models (`models={"planner": ModelConfig(lr=2e-5)}`): a LoRA adapter of the
    run's model. Settings that are None are the algorithm's."""

    adapter: str | None = None
    """Folder of the initial adapter in peft's format, with the rank, alpha and layers of `learner.lora`; None
    for a new adapter, which does not change the base."""
    trained: bool = True
    """False: the model is served as it is, and its calls are recorded and never trained on."""
    lr: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    weight_decay: float | None = Field(default=None, ge=0, le=MAX_FACTOR)
    grad_clip: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """Maximum norm of the gradient."""
    kl_coef: float | None = Field(default=None, ge=0, le=MAX_FACTOR)
    """Weight in the loss of the KL divergence from the base."""
    entropy_coef: float | None = Field(default=None, ge=-MAX_FACTOR, le=MAX_FACTOR)
    mini_batches: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    ppo_epochs: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)

    @field_validator("adapter")
    @classmethod
    def _resolve_folder(cls, adapter: str | None) -> str | None:
        return None if adapter is None else os.path.abspath(os.path.expanduser(adapter))

    @model_validator(mode="after")
    def _check_read(self) -> Self:
        if not self.trained and (unread := self.overrides):
            raise ValueError(f"nothing reads {', '.join(unread)} of a model with trained=False")
        return self

    @property
    def overrides(self) -> JsonObject:
        """Settings of the update that differ from the algorithm's."""
        return self.model_dump(exclude={"adapter", "trained"}, exclude_none=True)


class CriticSettings(OptimizerSettings):
    """Settings of a critic (PPO): a model of the policy's architecture with a head of one value per token."""

    model: str | None = None
    """Folder of the initial model; None for the policy's."""
    lr: float = Field(default=1e-5, gt=0, le=MAX_FACTOR)
    warmup_steps: int = Field(default=0, ge=0, le=MAX_COUNT)
    """First updates of the run, in which only the critic is trained."""
    mini_batches: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    ppo_epochs: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    cliprange_value: float = Field(default=0.5, gt=0, le=MAX_FACTOR)
    loss_agg_mode: LossAggregation = "token-mean"


class PolicySettings(OptimizerSettings, CorrectionSettings):
    """Settings of the policy update: advantages, loss, KL penalties and mini-batches."""

    rejects_unused_settings: ClassVar[bool] = False
    """True if a setting that would have no effect is an error."""

    advantage: AnyAdvantage = Field(default_factory=advantages.GRPOAdvantage)
    """Advantage estimator, such as `rl.advantages.GAEAdvantage(lam=0.95)`, or one added by
    `raylight.advantage_estimator`. Its settings may also be given flat, next to `adv_estimator`, its name."""
    critic: CriticSettings | None = None
    loss: AnyLoss = Field(default_factory=losses.VanillaLoss)
    """Policy loss, such as `rl.losses.ClipCovLoss(clip_cov_ratio=1e-3)`, or one added by
    `raylight.policy_loss`. Its settings may also be given flat, next to `loss_mode`, its name."""
    loss_agg_mode: LossAggregation = "token-mean"
    loss_scale_factor: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Divisor of seq-mean-token-sum-norm; None for the longest response of a mini-batch, on all ranks."""
    kl_coef: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Weight in the loss of the KL divergence from the initial policy; 0 needs no reference model."""
    kl_type: KlType = "k3"
    kl_reward_coef: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Weight of the same KL divergence, subtracted from the reward of each token."""
    kl_reward_type: KlType = "k1"
    kl_target: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """Target of the adaptive KL controller (https://arxiv.org/abs/1909.08593), which adjusts
    `kl_reward_coef`; None keeps that fixed."""
    kl_horizon: int = Field(default=10_000, ge=1, le=MAX_COUNT)
    """Horizon of the adaptive KL controller, in rollouts."""
    entropy_coef: float = Field(default=0.0, ge=-MAX_FACTOR, le=MAX_FACTOR)
    observation_coef: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Weight in the loss of the mean cross-entropy of observed tokens: those between two responses of a row,
    such as the results of tools. The model learns to predict what the environment returns. 0 leaves them
    out."""
    calculate_entropy: bool = True
    """Compute the entropy for the metrics even if the loss does not need it."""
    zero_variance_groups: Literal["keep", "drop"] = "keep"
    """Groups whose rewards are all equal: "keep" trains them with advantages of 0 (their tokens count in the
    mean), "drop" leaves them out. A single rollout is such a group only if its baseline is the group's."""
    mini_batches: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Parts into which a batch is split by rollout, with one optimizer step each."""
    ppo_epochs: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Passes over a batch."""

    _estimator: Callable[..., object] | None = PrivateAttr(default=None)
    _loss: Callable[..., object] | None = PrivateAttr(default=None)
    _local_teachers: tuple[str, ...] = PrivateAttr(default=())

    @model_validator(mode="before")
    @classmethod
    def _read_flat_keys(cls, values: Any) -> object:
        unread: list[str] = []
        for table in TABLES:
            values, found = table.nest(cls, values)
            unread += found
        if unread and cls.rejects_unused_settings:
            raise ValueError(f"nothing reads {'; '.join(unread)}")
        return values

    def model_post_init(self, context: object) -> None:
        """Store the user's functions, which the registry of the ranks, in other processes, lacks."""
        self._estimator, self._loss = (
            ADVANTAGES.resolve(self.advantage.name),
            LOSSES.resolve(self.loss.name),
        )

    @classmethod
    def flat_keys(cls) -> set[str]:
        """Return the keys that are read besides the fields, for losses and estimators."""
        return set().union(*(table.flat_keys for table in TABLES))

    @classmethod
    def unread_flat_keys(cls, values: Mapping[str, object]) -> list[str]:
        """Return a phrase for each changed flat key that the chosen loss or estimator does not read."""
        return [phrase for table in TABLES for phrase in table.nest(cls, values)[1]]

    @property
    def user_estimator(self) -> Callable[..., object] | None:
        """The user's advantage estimator; None for one of verl's."""
        return self._estimator

    @property
    def user_loss(self) -> Callable[..., object] | None:
        """The user's policy loss; None for one of verl's."""
        return self._loss

    @property
    def local_teachers(self) -> tuple[str, ...]:
        """Folders of the teachers on the learners' ranks."""
        return self._local_teachers

    def with_local_teachers(self, folders: Sequence[str]) -> Self:
        """Return a copy with teachers on the learners' ranks."""
        copy = self.model_copy()
        copy._local_teachers = tuple(folders)
        return copy

    @property
    def baseline_kind(self) -> BaselineKind:
        """Baseline of the advantage estimator."""
        return self.advantage.baseline_kind

    @property
    def has_teacher(self) -> bool:
        """True if there is a teacher."""
        return isinstance(self.advantage, advantages.OPDAdvantage)

    @property
    def divergence(self) -> DivergenceKind | None:
        """Divergence from a teacher's distributions in the loss; None if there is none."""
        if not isinstance(self.advantage, advantages.OPDAdvantage) or self.advantage.divergence == "sampled":
            return None
        return self.advantage.divergence

    @property
    def needs_teacher_logprobs(self) -> bool:
        """True if the estimator needs a teacher's log-probs of the sampled tokens."""
        return self.has_teacher and self.divergence is None

    @property
    def has_token_baselines(self) -> bool:
        """True if the estimator needs the policy's probabilities before the update."""
        return isinstance(self.advantage, advantages.TokenBaseline)

    @property
    def turn_advantage(self) -> advantages.GiGPOAdvantage | None:
        """Settings of an estimator that credits turns; None for another."""
        return self.advantage if isinstance(self.advantage, advantages.GiGPOAdvantage) else None

    @property
    def reward_weights(self) -> dict[str, float] | None:
        """Weights of named rewards that are normalised separately; None if only the final reward counts."""
        return getattr(self.advantage, "reward_weights", None)

    @property
    def reward_coef(self) -> float:
        """Weight of the advantages of rewards, which a teacher's are added to."""
        return self.advantage.reward_coef if isinstance(self.advantage, advantages.OPDAdvantage) else 1.0

    @model_validator(mode="after")
    def _check_required(self) -> Self:
        reads_rollouts = isinstance(self.advantage, advantages.GDPOAdvantage | advantages.GiGPOAdvantage)
        if reads_rollouts and self.kl_reward_coef:
            raise ValueError(
                f"adv_estimator {self.advantage.name!r} reads the rewards of rollouts or turns, not of "
                "tokens, so that kl_reward_coef has no effect; set kl_coef instead"
            )
        if self.has_teacher and self.kl_reward_coef and not self.reward_coef:
            raise ValueError(
                "adv_estimator 'opd' reads no rewards without reward_coef, so that kl_reward_coef has no "
                "effect; set reward_coef, or kl_coef instead"
            )
        if self.kl_coef and self.kl_type == "k1":
            raise ValueError(
                "kl_type 'k1' in the loss has an expected gradient of 0 on the policy's own samples; set "
                "kl_type='k2' (the gradient of the KL divergence) or 'k3', or subtract k1 from the reward by "
                "kl_reward_coef with kl_reward_type='k1'"
            )
        if self.has_token_baselines and self.bypass_mode:
            raise ValueError(
                f"adv_estimator {self.advantage.name!r} needs the learners' probabilities before the update, "
                "which bypass_mode leaves out; set bypass_mode=False"
            )
        return self

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self._needs_critic != (self.critic is not None):
            raise ValueError(
                "adv_estimator 'gae' (or a user's estimator with a parameter `values`) and a critic need "
                "each other; set both or neither"
            )
        if self.kl_target is not None and not self.kl_reward_coef:
            raise ValueError(
                "kl_target adjusts kl_reward_coef, which is 0; set kl_reward_coef to its initial value"
            )
        if self.bypass_mode and self.importance_level is not None:
            raise ValueError(
                "rollout_is cannot be combined with bypass_mode, whose loss already uses the ratio to the "
                "engine; remove it, or set bypass_mode=False"
            )
        if not self.max_staleness:
            return self
        if self.proximal == "loglinear" and (reason := self._interpolation_conflict()):
            raise ValueError(f"proximal='loglinear' {reason}; set proximal='recompute'")
        if not self._bounds_stale_tokens:
            raise ValueError(
                f"loss_mode {self.loss.name!r} does not clip the ratio of probabilities, so that nothing "
                f"bounds the effect of tokens of old weights (max_staleness={self.max_staleness}); set "
                "rollout_is='token' (or leave it at 'auto', without bypass_mode), or max_staleness=0"
            )
        return self

    @property
    def _needs_critic(self) -> bool:
        """True if the advantage estimator needs the values of a critic."""
        if self._estimator is None:
            return isinstance(self.advantage, advantages.GAEAdvantage)
        return "values" in inspect.signature(self._estimator).parameters

    @property
    def _bounds_stale_tokens(self) -> bool:
        """True if the loss or the correction bounds the effect of tokens that old weights sampled."""
        return self.correction_enabled or self.loss.is_bounded

    def _interpolation_conflict(self) -> str | None:
        """Return the reason why the proximal policy cannot be interpolated, or None."""
        if self.has_token_baselines:
            return f"has no log-probs before the training pass, which {self.advantage.name} needs"
        if self.importance_level is None:
            return "splits a ratio into the one that is clipped and a weight, and needs rollout_is"
        if self.rollout_rs is not None or self.rollout_is_batch_normalize or self.kl_reward_coef:
            return (
                "has no log-probs before the training pass, which rollout_rs, rollout_is_batch_normalize and "
                "kl_reward_coef need"
            )
        if self.user_loss is None:
            reads_ratio = not isinstance(self.loss, losses.GPGLoss)
        else:
            reads_ratio = "old_log_prob" in inspect.signature(self.user_loss).parameters
        return None if reads_ratio else f"needs a loss with a ratio, and {self.loss.name!r} has none"

    @property
    def updates_per_batch(self) -> int:
        """Optimizer steps per batch."""
        return self.mini_batches * self.ppo_epochs

    @property
    def needs_reference(self) -> bool:
        """True if a KL penalty needs the log-probs of the reference model."""
        return self.kl_coef > 0 or self.kl_reward_coef > 0

    @property
    def needs_old_logprobs(self) -> bool:
        """True if the policy's log-probs are needed before the training pass.

        With a single optimizer step per batch, the log-probs of the training pass itself are the old ones.
        """
        if self.proximal == "loglinear":
            return False
        if self.bypass_mode:
            return self.rollout_rs is not None
        return (
            self.updates_per_batch > 1
            or self.kl_reward_coef > 0
            or self.correction_enabled
            or self.has_token_baselines
        )


def unused_settings(settings: PolicySettings) -> list[str]:
    """Return changed settings that are not read, each with the choice that would read it."""
    changed = {
        name
        for name, field in type(settings).model_fields.items()
        if getattr(settings, name) != field.default
    }
    unused = [
        f"{name} (read with {prerequisite})"
        for name, prerequisite in PREREQUISITES.items()
        if name in changed and not getattr(settings, prerequisite)
    ]
    if "loss_scale_factor" in changed and settings.loss_agg_mode != SCALED_AGGREGATION:
        unused.append(
            f"loss_scale_factor (read with loss_agg_mode {SCALED_AGGREGATION}; it is "
            f"{settings.loss_agg_mode})"
        )
    return unused
