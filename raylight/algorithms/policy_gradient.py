"""The family of policy-gradient algorithms: each says only what it is, in the settings of its paper.

Formulas: r is a rollout's reward (with the rewards of its turns, if these are trained), A its advantage, which all its sampled
tokens share unless something else is said, and p the probability of a token under the policy that is trained over that under the
one that sampled.
"""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from raylight.algorithms.policy import GRPO, PolicyAlgorithm
from raylight.experience.settings import CriticSettings, KlType, LossAggregation
from raylight.types import FinishedRollout


class DrGRPO(GRPO):
    """GRPO done right, https://arxiv.org/abs/2503.20783: A = r - the group's mean, without the standard deviation; the loss is a
    sum over tokens that is divided by a constant, so that neither easy questions nor long answers are favoured."""

    norm_adv_by_std: bool = False
    loss_agg_mode: LossAggregation = "seq-mean-token-sum-norm"
    loss_scale_factor: int | None = Field(default=1024, ge=1)
    """The constant: about the longest response; it scales the loss only."""


class DAPO(GRPO):
    """Decoupled clip and dynamic sampling, https://arxiv.org/abs/2503.14476: GRPO with more room above than below (clip p to 1 -
    0.2 ... 1 + 0.28), a mean over tokens, new tasks in place of groups whose rewards are all equal, and a penalty for rollouts that
    are too long, which rises over the last `overlong_buffer` tokens before `max_response_tokens`."""

    clip_ratio_high: float = Field(default=0.28, ge=0)
    clip_ratio_c: float = Field(default=10.0, gt=1)
    zero_variance_groups: Literal["keep", "drop"] = "drop"
    max_rounds: int = Field(default=10, ge=1)
    max_response_tokens: int | None = Field(default=None, ge=1)
    """Tokens that a rollout should sample in all, at most. None: no rollout is too long."""
    overlong_buffer: int = Field(default=4096, ge=1)
    """Within so many tokens of that the penalty rises from 0."""
    overlong_factor: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """The penalty at `max_response_tokens` and above."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        fields = type(self).model_fields
        given = [
            name
            for name in ("overlong_buffer", "overlong_factor")
            if getattr(self, name) != fields[name].default
        ]
        if self.max_response_tokens is None and given:
            raise ValueError(f"nothing reads {', '.join(given)} without max_response_tokens")
        if self.max_response_tokens is not None and self.overlong_buffer > self.max_response_tokens:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} is more than max_response_tokens={self.max_response_tokens}; lower it"
            )
        return self

    def reward_of(self, item: FinishedRollout) -> float | None:
        """The reward, less the penalty for a rollout that is too long."""
        reward = super().reward_of(item)
        if reward is None or self.max_response_tokens is None:
            return reward
        over = sum(len(call.output_ids) for call in item.generations) - (
            self.max_response_tokens - self.overlong_buffer
        )
        return reward - self.overlong_factor * min(max(over / self.overlong_buffer, 0.0), 1.0)


class RLOO(PolicyAlgorithm):
    """REINFORCE leave-one-out, https://arxiv.org/abs/2402.14740: A = r - the mean reward of the others of the group; a rollout is
    one action, whose log-prob is the sum of those of its tokens."""

    adv_estimator: Literal["rloo"] = "rloo"
    group_size: int = Field(default=8, ge=2)
    loss_agg_mode: LossAggregation = "seq-mean-token-sum"


class ReinforcePlusPlus(PolicyAlgorithm):
    """REINFORCE++, https://arxiv.org/abs/2501.03262: a token's return is the rewards from there on (less `kl_reward_coef` times its
    divergence from the starting policy, which the paper takes), and A is that return, normalised over all tokens of the batch. It
    needs no groups."""

    adv_estimator: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    group_size: int = Field(default=1, ge=1)


class ReinforcePlusPlusBaseline(PolicyAlgorithm):
    """REINFORCE++ with a baseline, https://arxiv.org/abs/2501.03262: A = r - the group's mean, normalised over all tokens of the
    batch instead of the group. Where `kl_coef` is given, the divergence in the loss is estimated by k2, as in the paper."""

    adv_estimator: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    group_size: int = Field(default=8, ge=2)
    kl_type: KlType = "k2"


class ReMax(PolicyAlgorithm):
    """REINFORCE with a greedy baseline, https://arxiv.org/abs/2310.10505: A = r - the reward of one more rollout of the same task,
    in which each token is the most probable one and which is not trained.

    The agent must sample as its model says: it passes `llm.sampling_parameters` on, which has temperature 0 in that rollout.
    """

    adv_estimator: Literal["remax"] = "remax"
    group_size: int = Field(default=1, ge=1)


class OPO(PolicyAlgorithm):
    """On-policy optimisation with the optimal baseline, https://arxiv.org/abs/2505.23585: A = r - the mean reward of the group,
    weighted by the rollouts' lengths."""

    adv_estimator: Literal["opo"] = "opo"
    group_size: int = Field(default=8, ge=2)


class GPG(PolicyAlgorithm):
    """Group policy gradient, https://arxiv.org/abs/2504.02546: A = r - the group's mean, times the share by which rewards of 0
    dilute the batch; the loss is -A log-prob, without a ratio and without clipping."""

    adv_estimator: Literal["gpg"] = "gpg"
    loss_mode: Literal["gpg"] = "gpg"
    group_size: int = Field(default=8, ge=2)


class GSPO(GRPO):
    """Group sequence policy optimisation, https://arxiv.org/abs/2507.18071: GRPO in which the ratio is that of a whole row, as the
    geometric mean of p over its tokens, clipped to 1 - 0.0003 ... 1 + 0.0004."""

    loss_mode: Literal["gspo"] = "gspo"
    loss_agg_mode: LossAggregation = "seq-mean-token-mean"
    clip_ratio_low: float = Field(default=3e-4, ge=0)
    clip_ratio_high: float = Field(default=4e-4, ge=0)


class CISPO(GRPO):
    """Clipped importance sampling, https://arxiv.org/abs/2506.13585: the loss is -p A log-prob, in which p is clipped from above
    (to 1.2) and no gradient goes through it, so that no token is left out."""

    loss_mode: Literal["cispo"] = "cispo"
    clip_ratio_low: float = Field(default=10.0, ge=0)
    """More than 1: there is no bound below."""


class SAPO(GRPO):
    """Soft adaptive policy optimisation, https://arxiv.org/abs/2511.20347: instead of clipping, a sigmoid of p - 1 fades a token's
    gradient out, at temperature `tau_pos` where A > 0 and `tau_neg`, which fades faster, elsewhere."""

    loss_mode: Literal["sapo"] = "sapo"
    loss_agg_mode: LossAggregation = "seq-mean-token-mean"


class GMPO(GRPO):
    """Geometric-mean policy optimisation, https://arxiv.org/abs/2507.20673: the objective of a row is A times the geometric mean of
    p over its tokens, each clipped to exp(-0.4) ... exp(0.4)."""

    loss_mode: Literal["geo_mean"] = "geo_mean"
    loss_agg_mode: LossAggregation = "seq-mean-token-mean"
    clip_ratio_low: float = Field(default=0.4, ge=0)
    clip_ratio_high: float = Field(default=0.4, ge=0)


class ClipCov(GRPO):
    """Clip-Cov, https://arxiv.org/abs/2505.22617: GRPO that leaves out a few tokens (`clip_cov_ratio`), by chance, of those for
    which the covariance of log-prob and advantage is between `clip_cov_lb` and `clip_cov_ub`, because these use up the entropy.
    Ratios are clipped to 0 ... 2 only."""

    loss_mode: Literal["clip_cov"] = "clip_cov"
    clip_ratio_low: float = Field(default=1.0, ge=0)
    clip_ratio_high: float = Field(default=1.0, ge=0)


class KLCov(GRPO):
    """KL-Cov, https://arxiv.org/abs/2505.22617: GRPO without clipping, in which the few tokens of highest covariance of log-prob
    and advantage (`kl_cov_ratio`) are held to the old policy by a divergence in the loss, of weight `ppo_kl_coef`."""

    loss_mode: Literal["kl_cov"] = "kl_cov"
    kl_cov_ratio: float = Field(default=0.002, gt=0, le=1)
    ppo_kl_coef: float = Field(default=1.0, ge=0, allow_inf_nan=False)


class PPO(PolicyAlgorithm):
    """Proximal policy optimisation, https://arxiv.org/abs/1707.06347: a critic tells a value for each token, A is the generalised
    advantage estimate of it (https://arxiv.org/abs/1506.02438), normalised over the batch, and the loss is -min(p A, clip(p) A). It
    needs no groups."""

    adv_estimator: Literal["gae"] = "gae"
    group_size: int = Field(default=1, ge=1)
    lam: float = Field(default=0.95, ge=0, le=1)
    critic: CriticSettings | None = Field(default_factory=CriticSettings)
