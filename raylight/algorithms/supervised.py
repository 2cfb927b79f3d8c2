"""Algorithms that learn from examples with known answers, without rollouts."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from raylight._utils.bounds import MAX_COUNT, MAX_FACTOR, MAX_SAMPLES
from raylight.algorithms.base import BaseAlgorithm
from raylight.experience.settings.supervised_settings import (
    PreferenceSettings,
    RankingSettings,
    SupervisedSettings,
)
from raylight.traces.reward_spans import MAX_REWARD
from raylight.types import JsonObject, RolloutMode


class SupervisedAlgorithm(SupervisedSettings, BaseAlgorithm):
    """Settings of the algorithms that learn from given examples.

    Args:
        model: folder of a Hugging Face model, or its name in the local cache.

    Raises:
        ConfigError: a setting is unknown, out of range, in conflict with another, or would have no effect.
    """

    best_metrics: ClassVar[dict[str, Literal["max", "min"]]] = {"val/loss": "min"}
    """Metrics that can select the best model, and the direction in which each improves."""

    model: str
    data: object
    """Examples: a file, a list, or a run directory (or the file of a store), whose rollouts are learned."""
    val_data: object = None
    """Held-out examples in the same forms, on which the loss is measured; None: no validation."""
    split: RolloutMode | Literal["all"] = "train"
    """Mode of the rollouts that are taken from a run directory."""
    min_reward: float | None = Field(default=None, ge=-MAX_REWARD, le=MAX_REWARD)
    """Smallest reward of a rollout that is learned from a run directory; None: all that succeeded."""
    batch_size: int = Field(default=32, ge=1, le=MAX_COUNT)
    """Examples of a step at most."""
    batch_tokens: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Tokens of a step at most, prompts included; None: no limit. A longer example is a separate step."""
    n_epochs: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Passes over the examples; ignored if `n_steps` is set."""
    n_steps: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    val_every: int | None = Field(default=10, ge=0, le=MAX_COUNT)
    """Steps between validations, besides the validation after the last step; 0: only the latter; None:
    neither."""
    val_before_train: bool = True
    best: str | None = "val/loss"
    """Validation metric that selects the model kept in `best/`; None keeps none."""
    patience: int | None = Field(default=None, ge=1, le=MAX_SAMPLES)
    """Training stops after this many validations in a row without an improvement of `best`; None: never."""
    min_delta: float = Field(default=0.0, ge=0, le=MAX_FACTOR)
    """Smallest change of `best` that `patience` counts as an improvement."""

    @property
    def best_mode(self) -> Literal["max", "min"]:
        """Direction in which `best` improves."""
        return self.best_metrics[self.best] if self.best is not None else "min"

    @model_validator(mode="after")
    def _check_validation(self) -> Self:
        if self.best is not None and self.best not in self.best_metrics:
            raise ValueError(f"best={self.best!r} is not one of: {', '.join(self.best_metrics)}")
        if self.patience is not None and (self.val_data is None or self.best is None or not self.val_every):
            raise ValueError(
                "patience needs validations of a metric: set val_data, best to the metric's name, and "
                "val_every to 1 or more"
            )
        if self.min_delta and self.patience is None:
            raise ValueError("nothing reads min_delta without patience")
        return self

    def arguments(self) -> JsonObject:
        """Return the arguments that construct an equal algorithm, as JSON values."""
        return self.model_dump(mode="json", exclude={"data", "val_data"})

    def with_epochs(self, n_epochs: int) -> Self:
        """Return a copy with another number of passes over the examples."""
        return self.model_copy(update={"n_epochs": n_epochs})

    def policy_settings(self) -> SupervisedSettings:
        """Return the settings that the learners read."""
        kinds = (PreferenceSettings, RankingSettings, SupervisedSettings)
        kind = next(kind for kind in kinds if isinstance(self, kind))
        return kind(**{name: getattr(self, name) for name in kind.model_fields})


PAIR_METRICS: dict[str, Literal["max", "min"]] = {
    "val/loss": "min",
    "val/accuracy": "max",
    "val/margin": "max",
}
"""Metrics of pairs that can select the best model."""


class SFT(SupervisedAlgorithm):
    """Supervised fine-tuning, https://arxiv.org/abs/2203.02155.

    The loss is the negative log-likelihood of the answers, as a mean over their tokens.

    The answers of a conversation are learned; prompts, results of tools and answers with `"weight": 0` are
    context. Rollouts of a run directory are learned with the tokens that the engine recorded.
    """

    lr: float = Field(default=1e-5, gt=0, le=MAX_FACTOR)
    best_of_group: bool = False
    """Learn only the rollout with the highest reward of each group, the first one of several."""


class DPO(SupervisedAlgorithm, PreferenceSettings):
    """Direct preference optimisation, https://arxiv.org/abs/2305.18290.

    Each example is a pair of answers to the same prompt. The implicit reward of an answer is beta times the
    log ratio of its probability to the initial model's; the loss of a pair falls with the margin between the
    chosen and the rejected answer. From a run directory, the best rollout of each group is chosen over the
    worst one, if their rewards differ.
    """

    best_metrics = PAIR_METRICS


class RewardModel(SupervisedAlgorithm, RankingSettings):
    """Training of a reward model, https://arxiv.org/abs/2203.02155.

    A model with a head of one output scores a whole conversation. Each example is a pair, as for `DPO`; its
    loss is -log sigmoid(score of the chosen - score of the rejected answer - margin), where the margin is the
    pair's own or 0. The result is served by `rl.rewards.reward_model`.
    """

    best_metrics = PAIR_METRICS
    lr: float = Field(default=1e-5, gt=0, le=MAX_FACTOR)
