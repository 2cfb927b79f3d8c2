"""Advantage estimators, each with the settings that it reads. Names and defaults are verl's."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from raylight._utils.bounds import MAX_COUNT, MAX_FACTOR
from raylight.experience.settings.variants import Variant, VariantTable

__all__ = [
    "BatchBaseline",
    "GAEAdvantage",
    "GDPOAdvantage",
    "GRPOAdvantage",
    "GiGPOAdvantage",
    "GreedyBaseline",
    "GroupBaseline",
    "OPDAdvantage",
    "TokenBaseline",
]

BaselineKind = Literal["group", "batch", "greedy", "none"]
"""Baseline of an estimator: the group, the batch, a greedy rollout of the same task, or none known here."""
TurnGroups = Literal["state", "turn"]
"""Turns of a group's rollouts that are compared: with equal states, or with the same number."""
DivergenceKind = Literal["forward_kl", "reverse_kl", "js"]
"""Divergence between the next-token distributions of a teacher and of the policy."""
Weight = Annotated[float, Field(ge=-MAX_FACTOR, le=MAX_FACTOR)]
"""Weight of a reward in a sum."""


class Advantage(Variant):
    """Base of the advantage estimators."""

    BASELINE: ClassVar[BaselineKind] = "group"
    """Baseline of the estimator."""

    @property
    def baseline_kind(self) -> BaselineKind:
        """Baseline of the estimator."""
        return self.BASELINE


class GRPOAdvantage(Advantage):
    """Rewards less the mean of the group, https://arxiv.org/abs/2402.03300."""

    name: Literal["grpo", "grpo_passk", "grpo_vectorized"] = "grpo"
    norm_adv_by_std: bool = True
    """Divide advantages by the group's deviation; False is Dr.GRPO, https://arxiv.org/abs/2503.20783."""


class GDPOAdvantage(Advantage):
    """Named rewards that are normalised separately, https://arxiv.org/abs/2601.05242."""

    name: Literal["gdpo"] = "gdpo"
    norm_adv_by_std: bool = True
    """Divide each normalised reward by the group's deviation."""
    reward_weights: dict[str, Weight] | None = Field(default=None, min_length=1)
    """Weights of the rewards by name. Rewards with other names are not trained."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.reward_weights is None:
            raise ValueError(
                "adv_estimator 'gdpo' normalises named rewards separately; name them in reward_weights, "
                "as in {'correct': 1.0, 'format': 0.5}"
            )
        return self


class GiGPOAdvantage(Advantage):
    """Advantages of rollouts and of their turns, https://arxiv.org/abs/2505.10978.

    A rollout's is GRPO's. A turn's is its return, the discounted rewards from this turn on, less the mean of
    the turns that it is compared with: from equal states in the rollouts of the group. It is 0 for a turn
    without another to compare. All sampled tokens of a turn have the weighted sum of the two.
    """

    name: Literal["gigpo"] = "gigpo"
    norm_adv_by_std: bool = True
    """Divide the advantages of rollouts by the deviation in their group, and turns' by the deviation
    among the turns that they are compared with."""
    turn_groups: TurnGroups = "state"
    """Turns of a group that are compared. state: turns of equal states, as named by `rl.emit_state` before
    the call, or else those whose prompts have the same tokens. turn: those with the same number in their
    rollouts."""
    turn_gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount from one turn to the next."""
    turn_coef: float = Field(default=1.0, ge=0, le=MAX_FACTOR)
    """Weight of the advantages of turns."""
    rollout_coef: float = Field(default=1.0, ge=0, le=MAX_FACTOR)
    """Weight of the advantages of rollouts; 0 leaves only advantages of turns."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if not self.turn_coef:
            raise ValueError("turn_coef=0 leaves only the advantages of rollouts; use rl.GRPO")
        return self


class GAEAdvantage(Advantage):
    """Generalised advantage estimates from a critic's values, https://arxiv.org/abs/1506.02438."""

    BASELINE: ClassVar[BaselineKind] = "none"

    name: Literal["gae"] = "gae"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from one sampled token to the next."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of the estimates."""


class OPDAdvantage(Advantage):
    """Log ratio of a teacher's probability of each token to the policy's, https://arxiv.org/abs/2306.13649."""

    BASELINE: ClassVar[BaselineKind] = "none"

    name: Literal["opd"] = "opd"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Weight of the log ratio of the next token in a token's advantage, of the one after that squared, and so
    on. 1 is the divergence of the whole answer."""
    log_ratio_clip: float = Field(default=10.0, gt=0, le=MAX_FACTOR)
    """Bound of the log ratio."""
    reward_coef: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Weight of GRPO's advantages, which are added; 0 needs no rewards."""
    norm_adv_by_std: bool = True
    """Divide GRPO's advantages by the group's deviation."""
    divergence: Literal["sampled"] | DivergenceKind = "sampled"
    """Divergence of the policy from the teacher. sampled: the log ratio at the sampled token alone, as its
    advantage. The others are over the next-token distribution, and are minimised by their own gradient:
    forward_kl, KL(teacher || policy); reverse_kl, KL(policy || teacher); js, their generalised Jensen-Shannon
    divergence."""
    js_beta: float = Field(default=0.5, gt=0, lt=1)
    """Weight of the teacher in the mixture of `divergence="js"`: towards 0 it is the forward KL divergence
    (over beta), towards 1 the reverse one."""
    teacher_top_k: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """The teacher's most probable tokens that a divergence distinguishes; all others are one event. None:
    the whole vocabulary."""

    @model_validator(mode="after")
    def _check_divergence_read(self) -> Self:
        if self.divergence != "js" and self.js_beta != 0.5:
            raise ValueError(f"js_beta is read with divergence='js'; it is {self.divergence!r}")
        if self.divergence == "sampled" and self.teacher_top_k is not None:
            raise ValueError(
                "teacher_top_k is read with a divergence over the vocabulary; set divergence='forward_kl', "
                "'reverse_kl' or 'js'"
            )
        return self


class BatchBaseline(Advantage):
    """Returns that are whitened over the batch: REINFORCE++, https://arxiv.org/abs/2501.03262."""

    BASELINE: ClassVar[BaselineKind] = "batch"

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from one sampled token to the next."""


class GreedyBaseline(Advantage):
    """Rewards less the greedy rollout's of the task: ReMax, https://arxiv.org/abs/2310.10505."""

    BASELINE: ClassVar[BaselineKind] = "greedy"

    name: Literal["remax"] = "remax"


class GroupBaseline(Advantage):
    """Rewards less a baseline of the group, by an estimator without settings."""

    name: Literal["rloo", "rloo_vectorized", "opo", "gpg", "reinforce_plus_plus_baseline"] = "rloo"


class TokenBaseline(Advantage):
    """Rewards less a baseline of the group for each token, https://arxiv.org/abs/2602.07078."""

    name: Literal["optimal_token_baseline", "tir_optimal_token_baseline"] = "optimal_token_baseline"


USER_BASELINES: dict[str, BaselineKind] = {}
"""Baselines of the estimators that users registered, by name."""


class UserAdvantage(Advantage):
    """An estimator added by `raylight.advantage_estimator`, which may read these settings."""

    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from one sampled token to the next."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of generalised advantage estimation."""
    norm_adv_by_std: bool = True
    """Divide advantages by the group's deviation."""
    reward_weights: dict[str, Weight] | None = Field(default=None, min_length=1)
    """Weights of named rewards, whose sum is the reward; None: the final reward."""

    @property
    def baseline_kind(self) -> BaselineKind:
        """Baseline that the estimator was registered with."""
        return USER_BASELINES[self.name]


ADVANTAGES = VariantTable(
    kind="advantage estimator",
    field="advantage",
    selector="adv_estimator",
    decorator="advantage_estimator",
    arguments=(
        "token_level_rewards",
        "response_mask",
        "index",
        "values",
        "reward_baselines",
        "gamma",
        "lam",
        "norm_adv_by_std_in_grpo",
        "config",
    ),
    variants=(
        BatchBaseline,
        GAEAdvantage,
        GDPOAdvantage,
        GiGPOAdvantage,
        GreedyBaseline,
        GroupBaseline,
        GRPOAdvantage,
        OPDAdvantage,
        TokenBaseline,
    ),
    user=UserAdvantage,
)
AnyAdvantage = Annotated[SerializeAsAny[Advantage], BeforeValidator(ADVANTAGES.parse)]
"""An advantage estimator, or its name, or a mapping with its name and its settings."""
