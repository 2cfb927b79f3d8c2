"""Settings of an update from examples with known answers, which the driver sends to the learners."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from raylight._utils.bounds import MAX_FACTOR
from raylight.experience.settings.policy_settings import OptimizerSettings

PreferenceLoss = Literal["sigmoid", "ipo", "hinge", "robust"]
SMOOTHED_LOSSES = ("sigmoid", "robust")
"""Preference losses that read `label_smoothing`."""


class SupervisedSettings(OptimizerSettings):
    """Settings of an update that raises the likelihood of answers: one optimizer step for each batch."""

    mini_batches: ClassVar[int] = 1
    critic: ClassVar[None] = None
    needs_reference: ClassVar[bool] = False
    """True if an update reads the log-probs of the initial model."""


class PairSettings(SupervisedSettings):
    """Settings of an update from pairs, of which one answer is preferred to the other."""


class RankingSettings(PairSettings):
    """Settings of an update of a reward model."""

    center_rewards_coefficient: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Weight of the squared sum of a pair's scores, which keeps their mean near 0
    (https://arxiv.org/abs/2312.09244)."""


class PreferenceSettings(PairSettings):
    """Settings of an update of a policy that prefers one answer of a pair to the other."""

    needs_reference: ClassVar[bool] = True

    beta: float = Field(default=0.1, gt=0, le=MAX_FACTOR)
    """Strength of the preference; a larger one keeps the policy closer to the initial model."""
    loss_type: PreferenceLoss = "sigmoid"
    """Loss of a pair; docs/algorithms/dpo.md has the formulas."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Probability that a pair is labelled the wrong way round."""

    @model_validator(mode="after")
    def _check_smoothing(self) -> Self:
        if self.label_smoothing and self.loss_type not in SMOOTHED_LOSSES:
            raise ValueError(
                f"nothing reads label_smoothing with loss_type={self.loss_type!r}; leave it out, or choose "
                f"{' or '.join(map(repr, SMOOTHED_LOSSES))}"
            )
        return self
