"""Policy-gradient algorithms, each a set of settings from its paper.

Notation: r is the reward of a rollout (with its turns' rewards, if these are trained). A is its advantage,
which all its sampled tokens share unless stated otherwise. p is the ratio of a token's probability under the
trained policy to that under the policy that sampled it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Literal, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from raylight._utils.bounds import MAX_COUNT, MAX_FACTOR, MAX_SAMPLES
from raylight.algorithms.policy import GRPO, PolicyAlgorithm
from raylight.algorithms.teacher import TeacherConfig, UnimportedFunction
from raylight.components import NotImportedError, dotted_name, import_dotted_name
from raylight.experience.settings.losses import AnyLoss
from raylight.experience.settings.policy_settings import (
    CriticSettings,
    KlType,
    LossAggregation,
    PolicySettings,
    advantages,
    losses,
)
from raylight.experience.teachers import TeacherChoice
from raylight.experience.trajectories.reward_rules import LengthPenalty, RewardRules
from raylight.types import JsonObject


class DrGRPO(GRPO):
    """GRPO done right, https://arxiv.org/abs/2503.20783.

    A = r - the group's mean, not divided by the standard deviation. The loss is a sum over tokens divided by
    a constant. This removes GRPO's biases towards easy questions and towards long answers.
    """

    advantage: advantages.GRPOAdvantage = advantages.GRPOAdvantage(norm_adv_by_std=False)
    loss_agg_mode: LossAggregation = "seq-mean-token-sum-norm"
    loss_scale_factor: int | None = Field(default=1024, ge=1, le=MAX_COUNT)
    """The constant, about the length of the longest response; it only scales the loss."""


class DAPO(GRPO):
    """Decoupled clip and dynamic sampling policy optimisation, https://arxiv.org/abs/2503.14476.

    Differences from GRPO: p is clipped to [1 - 0.2, 1 + 0.28]; the loss is a mean over tokens; groups without
    reward variance are dropped and replaced by new tasks; rollouts that are too long get a penalty, which
    rises linearly over the last `overlong_buffer` tokens before `max_response_tokens`.
    """

    loss: AnyLoss = losses.VanillaLoss(clip_ratio_high=0.28, clip_ratio_c=10.0)
    zero_variance_groups: Literal["keep", "drop"] = "drop"
    max_rounds: int = Field(default=10, ge=1, le=MAX_SAMPLES)
    max_response_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Most tokens that a rollout should sample, over all its calls; None: no limit and no penalty."""
    overlong_buffer: int = Field(default=4096, ge=1, le=MAX_COUNT)
    """Tokens below `max_response_tokens` over which the penalty rises from 0."""
    overlong_factor: float = Field(default=1.0, gt=0, le=MAX_FACTOR)
    """Penalty at `max_response_tokens` and above."""

    @model_validator(mode="after")
    def _check_buffer(self) -> Self:
        fields = type(self).model_fields
        changed = [
            name
            for name in ("overlong_buffer", "overlong_factor")
            if getattr(self, name) != fields[name].default
        ]
        if self.max_response_tokens is None and changed:
            raise ValueError(f"nothing reads {', '.join(changed)} without max_response_tokens")
        if self.max_response_tokens is not None and self.overlong_buffer > self.max_response_tokens:
            raise ValueError(
                f"overlong_buffer={self.overlong_buffer} is more than max_response_tokens="
                f"{self.max_response_tokens}; lower it"
            )
        return self

    @property
    def reward_rules(self) -> RewardRules:
        rules = super().reward_rules
        if self.max_response_tokens is None:
            return rules
        penalty = LengthPenalty(self.max_response_tokens, self.overlong_buffer, self.overlong_factor)
        return replace(rules, length_penalty=penalty)


class GDPO(PolicyAlgorithm):
    """Group reward-decoupled normalisation policy optimisation, https://arxiv.org/abs/2601.05242.

    The agent returns several named rewards. Each is normalised within its group as in GRPO; A is their
    weighted sum, whitened over all tokens of the batch. So a reward of a small spread is not drowned by
    others, and rollouts with the same sum of different rewards have different advantages.
    """

    advantage: advantages.GDPOAdvantage = Field(default=None)  # type: ignore[assignment]
    """Estimator, whose `reward_weights` are required."""
    group_size: int = Field(default=8, ge=2, le=MAX_SAMPLES)


class RLOO(PolicyAlgorithm):
    """REINFORCE leave-one-out, https://arxiv.org/abs/2402.14740.

    A = r - the mean reward of the other rollouts of the group. A rollout is one action, whose log-prob is the
    sum over its tokens.
    """

    advantage: advantages.GroupBaseline = advantages.GroupBaseline(name="rloo")
    group_size: int = Field(default=8, ge=2, le=MAX_SAMPLES)
    loss_agg_mode: LossAggregation = "seq-mean-token-sum"


class ReinforcePlusPlus(PolicyAlgorithm):
    """REINFORCE++, https://arxiv.org/abs/2501.03262.

    The return of a token is the sum of rewards from that token on; A is the return, whitened over all tokens
    of the batch. The paper also subtracts `kl_reward_coef` times the KL divergence from the starting policy.
    Groups are not needed.
    """

    advantage: advantages.BatchBaseline = advantages.BatchBaseline()
    group_size: int = Field(default=1, ge=1, le=MAX_SAMPLES)


class ReinforcePlusPlusBaseline(PolicyAlgorithm):
    """REINFORCE++ with a group baseline, https://arxiv.org/abs/2501.03262.

    A = r - the group's mean, whitened over all tokens of the batch. With `kl_coef`, the KL divergence in the
    loss uses the k2 estimator, as in the paper.
    """

    advantage: advantages.GroupBaseline = advantages.GroupBaseline(name="reinforce_plus_plus_baseline")
    group_size: int = Field(default=8, ge=2, le=MAX_SAMPLES)
    kl_type: KlType = "k2"


class ReMax(PolicyAlgorithm):
    """ReMax: REINFORCE with a greedy baseline, https://arxiv.org/abs/2310.10505.

    A = r - the reward of one more rollout of the same task, which samples greedily and is not trained. The
    agent must use `llm.sampling_parameters` for its calls, because the greedy rollout sets temperature 0
    there.
    """

    advantage: advantages.GreedyBaseline = advantages.GreedyBaseline()
    group_size: int = Field(default=1, ge=1, le=MAX_SAMPLES)


class OPO(PolicyAlgorithm):
    """On-policy optimisation with the optimal baseline, https://arxiv.org/abs/2505.23585.

    A = r - the mean reward of the group, weighted by the lengths of its rollouts.
    """

    advantage: advantages.GroupBaseline = advantages.GroupBaseline(name="opo")
    group_size: int = Field(default=8, ge=2, le=MAX_SAMPLES)


class OTB(PolicyAlgorithm):
    """Optimal token baseline, https://arxiv.org/abs/2602.07078.

    A_t = the rewards from token t on, less a baseline of the group at position t: their mean, weighted by the
    squared norms of the rollouts' gradients up to t. These are estimated from probabilities, in the pass
    before the update.
    """

    advantage: advantages.TokenBaseline = advantages.TokenBaseline()
    group_size: int = Field(default=8, ge=2, le=MAX_SAMPLES)


class GiGPO(PolicyAlgorithm):
    """Group-in-group policy optimisation, https://arxiv.org/abs/2505.10978.

    A = GRPO's advantage of the rollout, plus `turn_coef` times the turn's: its discounted return less
    the mean of the turns of equal states in the rollouts of the group, divided by their deviation.
    """

    advantage: advantages.GiGPOAdvantage = advantages.GiGPOAdvantage()
    group_size: int = Field(default=8, ge=2, le=MAX_SAMPLES)


class GPG(PolicyAlgorithm):
    """Group policy gradient, https://arxiv.org/abs/2504.02546.

    A = r - the group's mean, times the number of rollouts over the number of those whose reward is not 0. The
    loss is -A log-prob, with neither a ratio nor clipping.
    """

    advantage: advantages.GroupBaseline = advantages.GroupBaseline(name="gpg")
    loss: losses.GPGLoss = losses.GPGLoss()
    group_size: int = Field(default=8, ge=2, le=MAX_SAMPLES)


class GSPO(GRPO):
    """Group sequence policy optimisation, https://arxiv.org/abs/2507.18071.

    GRPO with one ratio per row: the geometric mean of p over its tokens, clipped to [1 - 0.0003, 1 + 0.0004].
    """

    loss: losses.GSPOLoss = losses.GSPOLoss(clip_ratio_low=3e-4, clip_ratio_high=4e-4)
    loss_agg_mode: LossAggregation = "seq-mean-token-mean"


class CISPO(GRPO):
    """Clipped importance sampling policy optimisation, https://arxiv.org/abs/2506.13585.

    The loss is -p A log-prob. p is clipped from above (to 1.2) and carries no gradient, so every token
    contributes.
    """

    loss: losses.CISPOLoss = losses.CISPOLoss(clip_ratio_low=10.0)
    """`clip_ratio_low` above 1 means no lower bound."""


class DPPO(GRPO):
    """Divergence proximal policy optimisation, https://arxiv.org/abs/2602.04879.

    GRPO that bounds the change of a token's probability instead of its ratio p, which is to the engine
    (`bypass_mode`), truncated, and without gradient. A token contributes until its probability has moved in
    the direction of A by more than a bound: 0.15 in probability ("dppo_tv"), or a binary KL divergence, for
    which the authors take 0.05 ("dppo_kl").
    """

    loss: losses.DPPOLoss = losses.DPPOLoss(clip_ratio_low=0.15, clip_ratio_high=0.15, clip_ratio_c=20.0)
    """`clip_ratio_low` bounds the change where A is negative, `clip_ratio_high` where A is positive,
    `clip_ratio_c` is the upper bound of p."""
    bypass_mode: bool = True


class DRO(GRPO):
    """Direct reward optimisation, https://arxiv.org/abs/2405.19107.

    GRPO without clipping. The loss is -A log-prob plus a quadratic penalty: half of `dro_beta` times the
    squared log of p.
    """

    loss: losses.DROLoss = losses.DROLoss(dro_beta=0.05)


class SAPO(GRPO):
    """Soft adaptive policy optimisation, https://arxiv.org/abs/2511.20347.

    GRPO with a soft gate instead of clipping: a sigmoid of p - 1 damps a token's gradient, with temperature
    `tau_pos` where A > 0 and `tau_neg` elsewhere; the larger `tau_neg` damps faster.
    """

    loss: losses.SAPOLoss = losses.SAPOLoss()
    loss_agg_mode: LossAggregation = "seq-mean-token-mean"


class GMPO(GRPO):
    """Geometric-mean policy optimisation, https://arxiv.org/abs/2507.20673.

    The objective of a row is A times the geometric mean of p over its tokens, each p clipped to [exp(-0.4),
    exp(0.4)].
    """

    loss: losses.GMPOLoss = losses.GMPOLoss(clip_ratio_low=0.4, clip_ratio_high=0.4)
    loss_agg_mode: LossAggregation = "seq-mean-token-mean"


class ClipCov(GRPO):
    """Clip-Cov, https://arxiv.org/abs/2505.22617.

    GRPO that excludes a random `clip_cov_ratio` of the tokens, drawn from those whose covariance of log-prob
    and advantage is between `clip_cov_lb` and `clip_cov_ub`, because these reduce the entropy most. p is
    clipped to [0, 2].
    """

    loss: losses.ClipCovLoss = losses.ClipCovLoss(clip_ratio_low=1.0, clip_ratio_high=1.0)


class KLCov(GRPO):
    """KL-Cov, https://arxiv.org/abs/2505.22617.

    GRPO without clipping. A KL penalty of weight `ppo_kl_coef` keeps the `kl_cov_ratio` of tokens with the
    highest covariance of log-prob and advantage close to the old policy.
    """

    loss: losses.KLCovLoss = losses.KLCovLoss(kl_cov_ratio=0.002, ppo_kl_coef=1.0)


class PPO(PolicyAlgorithm):
    """Proximal policy optimisation, https://arxiv.org/abs/1707.06347.

    A critic estimates a value per token. A is the generalised advantage estimate
    (https://arxiv.org/abs/1506.02438), whitened over the batch, and the loss is -min(p A, clip(p) A). Groups
    are not needed.
    """

    advantage: advantages.GAEAdvantage = advantages.GAEAdvantage(lam=0.95)
    group_size: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    critic: CriticSettings | None = Field(default_factory=CriticSettings)


LOG_RATIO_CLIP = advantages.OPDAdvantage.model_fields["log_ratio_clip"].default
OPD_REWARD_SETTINGS = (
    "credit",
    "failure_reward",
    "max_rounds",
    "turn_rewards",
    "zero_variance_groups",
)
"""Settings of rewards, which are not read without `reward_coef`."""


class OPD(PolicyAlgorithm):
    """On-policy distillation, https://arxiv.org/abs/2306.13649.

    A teacher gives the log-prob of each token that the trained model has sampled. A = log of the ratio of the
    teacher's probability to the trained model's: the negative reverse KL divergence of the token, as its
    advantage. With another `divergence` the loss compares the next-token distributions instead, from the
    teacher's whole vocabulary or its `teacher_top_k`. `reward_coef` adds GRPO's advantages, with this weight.

    Args:
        teacher: folder or name of the teacher's model, or its settings.
    """

    teacher: TeacherConfig | None = None
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Several teachers by name, each a model or its settings, instead of `teacher`. All are on the learners'
    ranks, or all in engines."""
    teacher_of: TeacherChoice | None = None
    """Key of a task whose value is the name of its teacher; or a function from the task to the name, or its
    dotted name, package.module:function. It is read with `teachers`."""
    advantage: advantages.OPDAdvantage = advantages.OPDAdvantage(gamma=0.0)
    group_size: int = Field(default=4, ge=1, le=MAX_SAMPLES)

    @field_validator("teacher", mode="before")
    @classmethod
    def _parse_teacher(cls, value: object) -> object:
        return {"model": str(value)} if isinstance(value, str | PurePath) else value

    @field_validator("teachers", mode="before")
    @classmethod
    def _parse_teachers(cls, value: object) -> object:
        if not isinstance(value, Mapping):
            return value
        return {name: cls._parse_teacher(teacher) for name, teacher in value.items()}

    @field_validator("teacher_of", mode="before")
    @classmethod
    def _parse_choice(cls, value: object) -> object:
        if not isinstance(value, str) or ":" not in value:
            return value
        try:
            return import_dotted_name(value, "teacher_of")
        except NotImportedError:
            return UnimportedFunction(value, "teacher_of")

    @field_serializer("teacher_of", when_used="json")
    def _name_choice(self, value: TeacherChoice | None) -> str | None:
        if isinstance(value, UnimportedFunction):
            return value.name
        return value if value is None or isinstance(value, str) else dotted_name(value)

    @model_validator(mode="after")
    def _check_teachers(self) -> Self:
        if (self.teacher is None) == (not self.teachers):
            raise ValueError("rl.OPD needs teacher=..., or several by name in teachers=..., not both")
        if bool(self.teachers) != (self.teacher_of is not None):
            raise ValueError(
                "teachers and teacher_of need each other: teacher_of is the key of a task, or a function of "
                "it, that gives the name of its teacher; set both or neither"
            )
        if len({*map(self._is_local, self.teacher_models.values())}) > 1:
            raise ValueError(
                "some teachers are on the learners' ranks and some in engines; give all of them "
                "kind='learner', or none"
            )
        return self

    @model_validator(mode="after")
    def _check_divergence(self) -> Self:
        kind = self.advantage.divergence
        if kind == "sampled":
            if self.has_local_teacher:
                raise ValueError(
                    "a teacher with kind='learner' gives distributions, and divergence='sampled' reads "
                    "log-probs from an engine; set divergence='reverse_kl', or kind='auto'"
                )
            return self
        if any(teacher.tokenizer == "aligned" for teacher in self.teacher_models.values()):
            raise ValueError(
                f"divergence={kind!r} compares the probabilities of tokens, and a teacher with "
                "tokenizer='aligned' has others; set divergence='sampled', which compares texts"
            )
        unread = ["gamma"] if self.advantage.gamma else []
        unread += ["log_ratio_clip"] if self.advantage.log_ratio_clip != LOG_RATIO_CLIP else []
        if unread:
            raise ValueError(
                f"nothing reads {', '.join(unread)} with divergence={kind!r}; set divergence='sampled', or "
                "leave it out"
            )
        if not self.has_local_teacher and self.advantage.teacher_top_k is None:
            raise ValueError(
                f"divergence={kind!r} needs the teacher's whole distributions, and engines send only its "
                "most probable tokens; set teacher_top_k, or the teacher's kind='learner'"
            )
        return self

    @property
    def has_local_teacher(self) -> bool:
        """True if the teachers are on the learners' ranks."""
        return all(map(self._is_local, self.teacher_models.values()))

    def _is_local(self, teacher: TeacherConfig) -> bool:
        return teacher.kind == "learner" or (
            teacher.kind == "auto"
            and self.divergence is not None
            and self.advantage.teacher_top_k is None
            and not teacher.model_fields_set - {"model", "kind"}
        )

    def policy_settings(self, model: str | None = None) -> PolicySettings:
        """Return the settings that the learners read."""
        settings = super().policy_settings(model)
        if not self.has_local_teacher:
            return settings
        return settings.with_local_teachers([teacher.model for teacher in self.teacher_models.values()])

    @model_validator(mode="after")
    def _check_rewards_read(self) -> Self:
        if self.reward_coef:
            if self.group_size < 2:
                raise ValueError(
                    "reward_coef adds the advantages of groups, and group_size=1; set it to 2 or more"
                )
            return self
        fields = PolicyAlgorithm.model_fields
        unread = [name for name in OPD_REWARD_SETTINGS if getattr(self, name) != fields[name].default]
        unread += [] if self.advantage.norm_adv_by_std else ["norm_adv_by_std"]
        if unread:
            raise ValueError(f"nothing reads {', '.join(unread)} without reward_coef")
        return self

    @property
    def teacher_models(self) -> dict[str, TeacherConfig]:
        return self.teachers if self.teacher is None else {"teacher": self.teacher}

    @property
    def teacher_choice(self) -> TeacherChoice | None:
        return self.teacher_of

    def with_teachers(self, teachers: Mapping[str, TeacherConfig]) -> Self:
        """Return a copy with other settings of its teachers."""
        if self.teacher is None:
            return self.model_copy(update={"teachers": dict(teachers)})
        return self.model_copy(update={"teacher": teachers["teacher"]})

    @property
    def needs_rewards(self) -> bool:
        return self.reward_coef > 0

    @property
    def min_group(self) -> int:
        """Fewest rollouts of a group that can be trained."""
        return 2 if self.reward_coef else 1

    def arguments(self) -> JsonObject:
        """Return the arguments that construct an equal algorithm, as JSON values."""
        # defaults of the hardware replace what is not set
        given = {
            name: teacher.model_dump(mode="json", exclude_unset=True)
            for name, teacher in self.teacher_models.items()
        }
        return super().arguments() | (given if self.teacher is not None else {"teachers": given})
