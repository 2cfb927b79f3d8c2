"""Policy losses, each with the settings that it reads. Names and defaults are verl's.

An algorithm's own defaults, as in `rl.algorithms.GSPO`, are its paper's.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, create_model, model_validator

from raylight._utils.bounds import MAX_FACTOR
from raylight.experience.settings.variants import Variant, VariantTable

__all__ = [
    "CISPOLoss",
    "ClipCovLoss",
    "DPPOLoss",
    "DROLoss",
    "GMPOLoss",
    "GPGLoss",
    "GSPOLoss",
    "KLCovLoss",
    "SAPOLoss",
    "VanillaLoss",
]


class PolicyLossVariant(Variant):
    """Base of the policy losses."""

    @property
    def is_bounded(self) -> bool:
        """True if the loss bounds the ratio or its gradient."""
        return True


class ClippedLoss(PolicyLossVariant):
    """Base of the losses that clip the ratio, or bound it otherwise."""

    clip_ratio_low: float = Field(default=0.2, ge=0, le=MAX_FACTOR)
    """Distance of the lower bound from 1."""
    clip_ratio_high: float = Field(default=0.2, ge=0, le=MAX_FACTOR)
    """Distance of the upper bound from 1."""


class DualClippedLoss(ClippedLoss):
    """Base of the losses with a further bound."""

    clip_ratio_c: float = Field(default=3.0, gt=1, le=MAX_FACTOR)
    """Bound of the objective for negative advantages (dual clip, https://arxiv.org/abs/1912.09729)."""


class VanillaLoss(DualClippedLoss):
    """PPO's clipped objective, https://arxiv.org/abs/1707.06347."""

    name: Literal["vanilla"] = "vanilla"


class CISPOLoss(ClippedLoss):
    """-p A log-prob with a bounded ratio p without gradient, https://arxiv.org/abs/2506.13585."""

    name: Literal["cispo"] = "cispo"


class ClipCovLoss(ClippedLoss):
    """Clipped objective without the tokens that reduce the entropy most, https://arxiv.org/abs/2505.22617."""

    name: Literal["clip_cov"] = "clip_cov"
    clip_cov_ratio: float = Field(default=0.0002, gt=0, le=1)
    """Fraction of the tokens that is left out."""
    clip_cov_lb: float = Field(default=1.0, ge=-MAX_FACTOR, le=MAX_FACTOR)
    """Lower bound of the covariance of log-prob and advantage of these tokens."""
    clip_cov_ub: float = Field(default=5.0, ge=-MAX_FACTOR, le=MAX_FACTOR)
    """Upper bound of this covariance."""


class DPPOLoss(DualClippedLoss):
    """Bounds of the change of a token's probability, https://arxiv.org/abs/2602.04879.

    "dppo_tv" bounds the difference of probabilities, "dppo_kl" a binary KL divergence.
    """

    name: Literal["dppo_tv", "dppo_kl"] = "dppo_tv"


class DROLoss(PolicyLossVariant):
    """-A log-prob with a quadratic penalty, https://arxiv.org/abs/2405.19107."""

    name: Literal["dro"] = "dro"
    dro_beta: float | None = Field(default=None, gt=0, le=MAX_FACTOR)
    """Weight of the quadratic penalty."""

    @property
    def is_bounded(self) -> bool:
        return False

    @model_validator(mode="after")
    def _check_weight(self) -> Self:
        if self.dro_beta is None:
            raise ValueError("loss_mode 'dro' needs the weight of its penalty; set dro_beta, as to 0.05")
        return self


class GMPOLoss(ClippedLoss):
    """Geometric mean of the clipped ratios of a row, https://arxiv.org/abs/2507.20673."""

    name: Literal["geo_mean"] = "geo_mean"


class GPGLoss(PolicyLossVariant):
    """-A log-prob, with neither a ratio nor clipping, https://arxiv.org/abs/2504.02546."""

    name: Literal["gpg"] = "gpg"

    @property
    def is_bounded(self) -> bool:
        return False


class GSPOLoss(ClippedLoss):
    """One clipped ratio for each row, https://arxiv.org/abs/2507.18071."""

    name: Literal["gspo"] = "gspo"


class KLCovLoss(PolicyLossVariant):
    """A KL penalty on the tokens that reduce the entropy most, https://arxiv.org/abs/2505.22617."""

    name: Literal["kl_cov"] = "kl_cov"
    kl_cov_ratio: float = Field(default=0.0002, gt=0, le=1)
    """Fraction of the tokens with the penalty: those with the highest covariance of log-prob and
    advantage."""
    ppo_kl_coef: float = Field(default=0.1, ge=0, le=MAX_FACTOR)
    """Weight of the penalty."""

    @property
    def is_bounded(self) -> bool:
        return False


class SAPOLoss(PolicyLossVariant):
    """A soft gate in place of clipping, https://arxiv.org/abs/2511.20347."""

    name: Literal["sapo"] = "sapo"
    tau_pos: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    """Temperature of the gate where the advantage is positive."""
    tau_neg: float = Field(default=1.05, gt=0, le=MAX_FACTOR)
    """Temperature of the gate elsewhere."""


VARIANTS = (
    CISPOLoss,
    ClipCovLoss,
    DPPOLoss,
    DROLoss,
    GMPOLoss,
    GPGLoss,
    GSPOLoss,
    KLCovLoss,
    SAPOLoss,
    VanillaLoss,
)
UserLoss = create_model(
    "UserLoss",
    __base__=PolicyLossVariant,
    __module__=__name__,
    __doc__="A loss added by `raylight.policy_loss`, which may read the settings of all others.",
    **{
        name: (info.annotation, info)
        for variant in VARIANTS
        for name, info in variant.model_fields.items()
        if name != "name"
    },
)  # type: ignore[call-overload]
LOSSES = VariantTable(
    kind="policy loss",
    field="loss",
    selector="loss_mode",
    decorator="policy_loss",
    arguments=("old_log_prob", "log_prob", "advantages", "response_mask", "config"),
    variants=VARIANTS,
    user=UserLoss,
    unsupported={
        "bypass_mode": "it is a setting here: bypass_mode=True with loss_mode='vanilla' for its ppo_clip, or "
        "with loss_mode='cispo', clip_ratio_low=10 and clip_ratio_high=rollout_is_threshold - 1 for its "
        "reinforce",
    },
)
AnyLoss = Annotated[SerializeAsAny[PolicyLossVariant], BeforeValidator(LOSSES.parse)]
"""A policy loss, or its name, or a mapping with its name and its settings."""
