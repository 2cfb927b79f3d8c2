"""Algorithms that train a policy on rollouts. Each says only what it is; the loop in `raylight.trainer` runs them all."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from raylight.algorithms.base import AnyAlgorithm
from raylight.algorithms.run_settings import RunSettings
from raylight.config import LearnerConfig
from raylight.experience.batch import BatchReport, BatchRules, TrainBatch, build_batch, scored
from raylight.experience.remax_baseline import baselines_of
from raylight.experience.settings import PolicySettings
from raylight.experience.unused_settings import unread
from raylight.types import GREEDY, FinishedRollout, RolloutConfig


class PolicyAlgorithm(PolicySettings, AnyAlgorithm):
    """Settings that every policy-gradient algorithm shares.

    Args:
        model: folder of a Hugging Face model, or the name of one in the local cache.
    """

    refuses_unread: ClassVar[bool] = True
    """Whether a setting that nothing reads is an error."""

    model: str
    group_size: int = Field(default=8, ge=1)
    """Rollouts of one task that are compared with one another."""
    tasks_per_step: int = Field(default=16, ge=1)
    n_epochs: int = Field(default=1, ge=1)
    """Passes over the training tasks, unless `n_steps` says how many steps to take."""
    n_steps: int | None = Field(default=None, ge=0)
    val_every: int | None = Field(default=10, ge=0)
    """Steps between validations, beside the one at the end; 0: only that; None: neither."""
    val_before_train: bool = True
    val_samples: int = Field(default=1, ge=1)
    """Rollouts per validation task."""
    pass_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Reward from which a rollout passes, for `val/pass_at_k`."""
    best: str | None = "val/reward"
    """Metric of validation by which the best model is kept in `best/`; None keeps none."""
    best_mode: Literal["max", "min"] = "max"
    """Whether a higher or a lower `best` is better."""
    patience: int | None = Field(default=None, ge=1)
    """Training ends early after so many validations in a row in which `best` got no better; None never does."""
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """By how much `best` must get better for `patience`."""
    failure_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Reward of a rollout whose agent failed; None leaves it out. Failures of the infrastructure are always left out."""
    max_steps_without_signal: int = Field(default=20, ge=1)
    """Training ends early after so many steps in a row in which no rollout was better than its group."""
    turn_rewards: bool = False
    """Train on the rewards that an agent emits before the final one too, each as that of the last call before it."""
    max_rounds: int = Field(default=1, ge=1)
    """Times that new tasks are rolled out for a step until `tasks_per_step` groups have rewards that differ (dynamic sampling,
    https://arxiv.org/abs/2503.14476). All groups that have are trained, so that a batch may be larger."""
    sampling_parameters: dict[str, Any] = Field(default_factory=dict)
    """What agents are told to sample with (`LLM.sampling_parameters`), where they declare nothing else for the trained model."""
    sync_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline for new weights to reach every engine."""
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig(timeout_seconds=600.0))
    """Limits and retries of each rollout."""

    @model_validator(mode="after")
    def _patience_is_read(self) -> Self:
        if self.patience is not None and (self.best is None or not self.val_every):
            raise ValueError(
                "patience counts validations without a better `best`; it needs a metric as best, and val_every"
            )
        if self.min_delta and self.patience is None:
            raise ValueError("nothing reads min_delta without patience")
        return self

    @model_validator(mode="after")
    def _all_is_read(self) -> Self:
        if self.refuses_unread and (names := unread(self)):
            raise ValueError(f"nothing reads {'; '.join(names)}")
        return self

    def adjust_run_settings(self, given: RunSettings) -> RunSettings:
        """Settings of a run with this algorithm, of those that the Trainer was given."""
        return given

    def with_epochs(self, n_epochs: int) -> Self:
        """The same algorithm with another number of passes over the tasks."""
        return type(self)(**self.model_dump() | {"n_epochs": n_epochs})

    def steps(self, n_train: int) -> int:
        """Steps of the whole run for a training set of `n_train` tasks."""
        if self.n_steps is not None:
            return self.n_steps
        return -(-n_train * self.n_epochs // self.tasks_per_step)

    @property
    def samples_greedily(self) -> bool:
        """Whether each task is rolled out once more, with the most probable tokens, to be compared with (ReMax)."""
        return self.baseline_kind == "greedy"

    def reward_of(self, item: FinishedRollout) -> float | None:
        """The reward that a rollout is trained with; None leaves it out."""
        return scored(item, self.failure_reward)

    def batch_of(
        self, finished: list[FinishedRollout], learner: LearnerConfig, trained_agents: str | None = None
    ) -> tuple[TrainBatch, BatchReport]:
        """What the learners are given of a step's rollouts.

        Args:
            trained_agents: regular expression for the agents whose calls are trained.

        Raises:
            EmptyTraceError: nothing of the scored rollouts can be trained.
            RowTooLongError: a trajectory is longer than a learner takes.
            GreedyError: a rollout that should have been greedy was not.
        """
        rules = self._rules(learner, trained_agents)
        if not self.samples_greedily:
            return build_batch(finished, rules, self.reward_of)
        sampled = [item for item in finished if not item.rollout.metadata.get(GREEDY)]
        return build_batch(
            sampled, rules, self.reward_of, baselines_of(finished, self.reward_of, self.turn_rewards)
        )

    def _rules(self, learner: LearnerConfig, trained_agents: str | None) -> BatchRules:
        return BatchRules(
            failure_reward=self.failure_reward,
            min_group=min(self.group_size, 2) if self.baseline_kind == "group" else 1,
            trained_agents=trained_agents,
            zero_variance_groups=self.zero_variance_groups,
            row_limit=learner.row_limit,
            long_rows=learner.long_rows,
            turn_rewards=self.turn_rewards,
            baseline_kind=self.baseline_kind,
        )


class GRPO(PolicyAlgorithm):
    """Group relative policy optimisation, https://arxiv.org/abs/2402.03300: a rollout's advantage is how much better its reward is
    than the mean of its group, in units of the group's standard deviation; the loss is PPO's clipped objective."""

    adv_estimator: Literal["grpo"] = "grpo"
    group_size: int = Field(default=8, ge=2)
