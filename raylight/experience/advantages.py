"""Advantage estimators, each with the settings that it reads. Names and defaults are verl's."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, SerializeAsAny, model_validator

from raylight._utils.bounds import MAX_FACTOR
from raylight.experience.variants import Variant, VariantTable

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
"""Turns of a group's rollouts that are compared: those of equal states, or with the same number."""
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
    """Named rewards that are normalised apart, https://arxiv.org/abs/2601.05242."""

    name: Literal["gdpo"] = "gdpo"
    norm_adv_by_std: bool = True
    """Divide each normalised reward by the group's deviation."""
    reward_weights: dict[str, Weight] | None = Field(default=None, min_length=1)
    """Weights of the rewards by name. Rewards with other names are not trained."""

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if self.reward_weights is None:
            raise ValueError(
                "adv_estimator 'gdpo' normalises named rewards apart; name them in reward_weights, as in "
                "{'correct': 1.0, 'format': 0.5}"
            )
        return self


class GiGPOAdvantage(Advantage):
    """Advantages of rollouts and of their turns, https://arxiv.org/abs/2505.10978.

    A rollout's is GRPO's. A turn's is its return, the discounted rewards from this turn on, less the mean of
    the turns that it is compared with: those of equal states in the rollouts of the group. It is 0 for a turn
    without another to compare. All sampled tokens of a turn have the weighted sum of the two.
    """

    name: Literal["gigpo"] = "gigpo"
    norm_adv_by_std: bool = True
    """Divide the advantages of rollouts by the deviation in their group, and those of turns by the deviation
    among the turns that they are compared with."""
    turn_groups: TurnGroups = "state"
    """Turns of a group that are compared. state: those of equal states, as named by `rl.emit_state` before
    the call, or else those whose prompts have the same tokens. turn: those with the same number in their
    rollouts."""
    turn_gamma: float = Field(default=0.95, ge=0, le=1)
    """Discount from one turn to the next."""
    turn_coef: float = Field(default=1.0, ge=0, le=MAX_FACTOR)
    """Weight of the advantages of turns."""
    rollout_coef: float = Field(default=1.0, ge=0, le=MAX_FACTOR)
    """Weight of the advantages of rollouts; 0 leaves only those of turns."""

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


class BatchBaseline(Advantage):
    """Returns that are whitened over the batch: REINFORCE++, https://arxiv.org/abs/2501.03262."""

    BASELINE: ClassVar[BaselineKind] = "batch"

    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount from one sampled token to the next."""


class GreedyBaseline(Advantage):
    """Rewards less that of a greedy rollout of the same task: ReMax, https://arxiv.org/abs/2310.10505."""

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
