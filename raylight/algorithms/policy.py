"""Base of the policy-gradient algorithms: their common settings, and the rules of their batches.

An algorithm declares settings; the loop in `raylight.trainer` runs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from raylight._utils.bounds import MAX_COUNT, MAX_FACTOR, MAX_ROLLOUTS, MAX_SAMPLES, MAX_SECONDS, MAX_TASKS
from raylight.agent.decorators import BUILTIN_PARAMETERS
from raylight.agent.resources import check_sampling
from raylight.algorithms.base import BaseAlgorithm
from raylight.algorithms.teacher import TeacherConfig
from raylight.config import MODEL_NAME, CheckpointConfig, EngineConfig, LearnerConfig
from raylight.experience.batches.batch import BatchRules
from raylight.experience.opponents import OPPONENT, SelfPlay
from raylight.experience.settings.advantages import GRPOAdvantage, UserAdvantage
from raylight.experience.settings.policy_settings import ModelConfig, PolicySettings, unused_settings
from raylight.experience.teachers import TeacherChoice
from raylight.experience.trajectories.off_policy import OffPolicySampling
from raylight.experience.trajectories.reward_rules import RewardRules
from raylight.experience.trajectories.staleness import StaleMask
from raylight.experience.trajectories.trajectory import TrajectorySelection
from raylight.traces.reward_spans import MAX_REWARD
from raylight.types import GREEDY_BELOW, JsonObject, RolloutConfig


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run besides its algorithm's."""

    engine: EngineConfig
    learner: LearnerConfig
    checkpoint: CheckpointConfig
    seed: int | None = None
    output_dir: str | Path | None = None
    outputs: str = "outputs"
    """Folder in which the run directory is created without `output_dir`."""
    loggers: Any = None
    """Metric loggers, as for `Trainer(loggers=...)`."""
    notes: tuple[str, ...] = ()
    """Messages for the user at the start of the run."""
    cpu_fallback: RunSettings | None = None
    """Settings for a cluster without GPUs; None: the same settings."""

    def for_hardware(self, gpus: float) -> RunSettings:
        """Return the settings for a cluster with so many GPUs."""
        return self if gpus or self.cpu_fallback is None else self.cpu_fallback


MODEL_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names of models: parts of paths and of metrics."""
RESERVED_MODELS = BUILTIN_PARAMETERS | {MODEL_NAME, OPPONENT, "llm", "main_llm"}
"""Names of the base, and of other parameters of rollout functions."""


class PolicyAlgorithm(PolicySettings, BaseAlgorithm):
    """Settings of all policy-gradient algorithms.

    Args:
        model: folder of a Hugging Face model, or its name in the local cache.

    Raises:
        ConfigError: a setting is unknown, out of range, in conflict with another, or would have no effect.
    """

    rejects_unused_settings: ClassVar[bool] = True

    model: str
    group_size: int = Field(default=8, ge=1, le=MAX_SAMPLES)
    """Rollouts per task and step; they form a group."""
    models: dict[str, ModelConfig] = Field(default_factory=dict)
    """Several models in one run, by name: LoRA adapters of `model`, each with its own weights, optimizer and
    settings. A folder in place of a `ModelConfig` is the initial adapter. Agents name the model that they
    call. Empty: the run has one model."""
    opponents: SelfPlay | None = None
    """Self-play: agents also call the model `opponent`, an older version of the policy."""
    tasks_per_step: int = Field(default=16, ge=1, le=MAX_TASKS)
    n_epochs: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Passes over the training tasks; ignored if `n_steps` is set."""
    n_steps: int | None = Field(default=None, ge=0, le=MAX_COUNT)
    val_every: int | None = Field(default=10, ge=0, le=MAX_COUNT)
    """Steps between validations, besides the validation after the last step; 0: only the latter; None:
    neither."""
    val_before_train: bool = True
    val_samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Rollouts per validation task."""
    pass_reward: float = Field(default=1.0, ge=-MAX_REWARD, le=MAX_REWARD)
    """Smallest reward of a rollout that passes, for `val/pass_at_k`."""
    best: str | None = "val/reward"
    """Validation metric that selects the model kept in `best/`; None keeps none."""
    best_mode: Literal["max", "min"] = "max"
    """Direction in which `best` improves."""
    patience: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Training stops after this many validations in a row without an improvement of `best`; None: never."""
    min_delta: float = Field(default=0.0, ge=0, le=2 * MAX_REWARD)
    """Smallest change of `best` that `patience` counts as an improvement."""
    failure_reward: float | None = Field(default=None, ge=-MAX_REWARD, le=MAX_REWARD)
    """Reward of a rollout whose agent failed. None excludes it from the update, and counts it in evaluations
    with 0, or with the lowest reward of the others if that is negative. Infrastructure failures are always
    excluded."""
    max_steps_without_signal: int = Field(default=20, ge=1, le=MAX_COUNT)
    """Training stops after this many steps in a row in which no rollout differed from its baseline."""
    turn_rewards: bool = False
    """Also train on rewards that an agent emits before the final one, each assigned to the last call before
    it, and on rewards of `rl.rewards.each_turn`."""
    credit: Literal["rollout", "agent"] = "rollout"
    """Calls that share a reward, a baseline and an advantage. rollout: all of a rollout. agent: all of one
    agent (`llm.for_agent`, or spans with `gen_ai.agent.name`), with the reward that it got by
    `emit_reward(..., agent=...)`, else the rollout's; its group are the same agent's calls in the other
    rollouts of the group."""
    agent_weights: dict[str, Annotated[float, Field(gt=0, le=MAX_FACTOR)]] = Field(default_factory=dict)
    """Factors of the advantages of agents, by name, with `credit="agent"`; 1 for others. To leave agents out,
    use `trained_agents`."""
    max_rounds: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Most groups per step, as a multiple of `tasks_per_step`. A group whose rewards are all equal is
    replaced by one of a new task, until `tasks_per_step` groups have rewards that differ (dynamic sampling,
    https://arxiv.org/abs/2503.14476)."""
    sampling_parameters: JsonObject = Field(default_factory=dict)
    """Default sampling parameters of the trained model (`LLM.sampling_parameters`); an agent's own
    declaration wins."""
    val_sampling_parameters: JsonObject | None = None
    """Sampling parameters of validation rollouts, such as `{"temperature": 0.0}`, over training's;
    None: the same. The agent must pass `llm.sampling_parameters` on."""
    off_policy_sampling: OffPolicySampling = "error"
    """Treatment of training calls whose recorded sampling is not the policy's own distribution, and which the
    learner cannot replay: temperature 0, a bias, and top_p, top_k, min_p and penalties of an engine that does
    not record which tokens could have been sampled. error: the run ends. mask: their tokens are left out of
    the loss, and counted."""
    override_sampling: bool = False
    """Set the sampling of all calls of training rollouts, whatever the agent requests: the temperature of
    `sampling_parameters` (1 if it has none), without top_p, top_k, min_p, penalties, biases and seeds."""
    train_auxiliary_calls: bool = False
    """Also train on calls that asked for another model name than the attempt's own, such as calls of a
    harness for titles and summaries. The served model answers them too."""
    trajectory_selection: TrajectorySelection = "all"
    """Rows of a rollout that are trained, if its calls form several: subagents, a history that was summarized
    or changed. all: every row. longest: the row with most trained tokens."""
    sync_timeout_s: float = Field(default=120.0, gt=0, le=MAX_SECONDS)
    """Deadline in seconds for new weights to reach every engine."""
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig(timeout_seconds=600.0))
    """Limits and retries of each rollout."""
    stale: Literal["wait", "drop", "mask"] = "wait"
    """Order in which groups are trained, and treatment of tokens older than `max_staleness`. wait: in the
    order in which they began, so that no token is too old. drop: in the order in which they finish; a group
    with such a token is replaced by a new task. mask: in the order in which they finish; such tokens are left
    out of the loss, and the rewards of their rollouts count."""

    _check_sampling = field_validator("sampling_parameters")(check_sampling)

    @field_validator("val_sampling_parameters")
    @classmethod
    def _check_val_sampling(cls, values: JsonObject | None) -> JsonObject | None:
        return values if values is None else check_sampling(values)

    @field_validator("models", mode="before")
    @classmethod
    def _read_folders(cls, models: object) -> object:
        if not isinstance(models, Mapping):
            return models
        return {
            name: {"adapter": str(value)} if isinstance(value, str | Path) else value
            for name, value in models.items()
        }

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        if not self.models:
            return self
        if wrong := [name for name in self.models if not MODEL_ID.fullmatch(name) or name in RESERVED_MODELS]:
            raise ValueError(
                f"models: {wrong[0]!r:.100} cannot name a model; use letters, digits, '_' and '-', and none "
                f"of {', '.join(sorted(RESERVED_MODELS))}"
            )
        if not self.trained_models:
            raise ValueError("models: none is trained; leave trained=False out for one of them")
        if self.critic is not None or self.has_teacher or self.needs_greedy_rollouts:
            raise ValueError(
                "several models have neither a critic, a teacher nor greedy baselines; train one model, or "
                "use an algorithm without them, such as GRPO"
            )
        for name, model in self.models.items():
            if model.trained and model.adapter and self.policy_settings(name).needs_reference:
                raise ValueError(
                    f"models: the KL divergence of {name!r} would be that from the base, without its initial "
                    "adapter; leave kl_coef and kl_reward_coef out"
                )
        return self

    @model_validator(mode="after")
    def _check_opponents(self) -> Self:
        if self.opponents is None:
            return self
        if self.models or self.needs_greedy_rollouts:
            raise ValueError(
                "opponents are older versions of the only model, and greedy baselines have none; leave "
                "models out, and use another algorithm than ReMax"
            )
        if self.max_staleness:
            raise ValueError(
                "opponents change between steps, and max_staleness above 0 has groups of several steps in "
                "progress at a time; set max_staleness=0"
            )
        return self

    @property
    def trained_models(self) -> tuple[str, ...]:
        """Names of the trained models in a run with several, or with opponents; empty if there is one."""
        if self.opponents is not None:
            return (MODEL_NAME,)
        return tuple(name for name, model in self.models.items() if model.trained)

    @property
    def served_models(self) -> tuple[str, ...]:
        """Names of the models that agents may call; empty if there is one."""
        return (MODEL_NAME, OPPONENT) if self.opponents is not None else tuple(self.models)

    @property
    def untrained_models(self) -> tuple[str, ...]:
        """Names of the models that are served as they are."""
        return tuple(name for name, model in self.models.items() if not model.trained)

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.tasks_per_step * self.group_size > MAX_ROLLOUTS:
            raise ValueError(
                f"tasks_per_step={self.tasks_per_step} with group_size={self.group_size} is more than "
                f"{MAX_ROLLOUTS:,} rollouts in one step, which are in memory together; lower them"
            )
        if self.reward_weights is not None and self.turn_rewards:
            raise ValueError(
                "reward_weights are of the final rewards of rollouts, and turn_rewards adds others to them; "
                "set turn_rewards=False"
            )
        if self.agent_weights and self.credit != "agent":
            raise ValueError('agent_weights are read with credit="agent"')
        if self.training_temperature is not None and self.training_temperature < GREEDY_BELOW:
            raise ValueError(
                "override_sampling samples training rollouts at the temperature of sampling_parameters, "
                "which is 0, so that all rollouts of a group would be equal; set a temperature above 0"
            )
        if self.patience is not None and (self.best is None or not self.val_every):
            raise ValueError(
                "patience needs validations of a metric: set best to its name and val_every to 1 or more"
            )
        if self.min_delta and self.patience is None:
            raise ValueError("nothing reads min_delta without patience")
        if self.has_teacher and not self.teacher_models:
            raise ValueError(
                f"adv_estimator {self.advantage.name!r} needs a teacher; use rl.OPD(teacher=...)"
            )
        if self.rejects_unused_settings and (names := unused_settings(self)):
            raise ValueError(f"nothing reads {'; '.join(names)}")
        return self

    @property
    def training_temperature(self) -> float | None:
        """Temperature of all calls of training rollouts; None leaves the sampling to the agents."""
        if not self.override_sampling:
            return None
        temperature = self.sampling_parameters.get("temperature")
        return 1.0 if temperature is None else float(temperature)

    def arguments(self) -> JsonObject:
        """Return the arguments that construct an equal algorithm, as JSON values."""
        return self.model_dump(mode="json")

    def adjust_run_settings(self, settings: RunSettings) -> RunSettings:
        """Return the settings of a run with this algorithm, given the Trainer's."""
        return settings

    def with_epochs(self, n_epochs: int) -> Self:
        """Return a copy with another number of passes over the training tasks."""
        return self.model_copy(update={"n_epochs": n_epochs})

    def policy_settings(self, model: str | None = None) -> PolicySettings:
        """Return the settings that the learners read.

        Args:
            model: name of one of several models.
        """
        own = {} if model is None else self.models[model].overrides
        return PolicySettings(**{name: getattr(self, name) for name in PolicySettings.model_fields} | own)

    def steps(self, n_train: int) -> int:
        """Return the number of steps for `n_train` training tasks."""
        if self.n_steps is not None:
            return self.n_steps
        return -(-n_train * self.n_epochs // self.tasks_per_step)

    def repeated_tasks(self, n_train: int) -> int:
        """Return the number of tasks in the last step that are beyond `n_epochs` passes."""
        return 0 if self.n_steps is not None else -n_train * self.n_epochs % self.tasks_per_step

    @property
    def needs_greedy_rollouts(self) -> bool:
        """True if each task gets one more rollout, with greedy sampling, as the baseline (ReMax)."""
        return self.baseline_kind == "greedy"

    @property
    def needs_rewards(self) -> bool:
        """True if rollouts without a reward cannot be trained."""
        return True

    @property
    def teacher_models(self) -> dict[str, TeacherConfig]:
        """The teachers by name; none for most algorithms."""
        return {}

    @property
    def teacher_choice(self) -> TeacherChoice | None:
        """Key or function that chooses a task's teacher; None if there are not several."""
        return None

    def with_teachers(self, teachers: Mapping[str, TeacherConfig]) -> Self:
        """Return a copy with other settings of its teachers."""
        return self

    @property
    def has_local_teacher(self) -> bool:
        """True if the teachers are on the learners' ranks."""
        return False

    @property
    def needs_spans(self) -> bool:
        """True if the spans of rollouts are needed to train on them, not only their tokens and rewards."""
        reads_states = self.turn_advantage is not None and self.turn_advantage.turn_groups == "state"
        return self.turn_rewards or reads_states or self.needs_messages or self.credit == "agent"

    @property
    def needs_messages(self) -> bool:
        """True if the messages of calls are needed to train on them, not only their tokens."""
        return any(
            teacher.prompt is not None or teacher.tokenizer == "aligned"
            for teacher in self.teacher_models.values()
        )

    @property
    def min_group(self) -> int:
        """Fewest rollouts of a group that can be trained."""
        return min(self.group_size, 2) if self.baseline_kind == "group" else 1

    @property
    def reward_rules(self) -> RewardRules:
        """Rules that give a finished rollout the reward that it is trained with."""
        return RewardRules(
            failure_reward=self.failure_reward,
            unscored_reward=None if self.needs_rewards else 0.0,
            weights=self.reward_weights,
            turn_rewards=self.turn_rewards,
            turn_gamma=None if self.turn_advantage is None else self.turn_advantage.turn_gamma,
        )

    def batch_rules(
        self, learner: LearnerConfig, trained_agents: str | None = None, version: int = 0
    ) -> BatchRules:
        """Return the rules by which `build_batch` turns the rollouts of a step into the learners' batch.

        Args:
            trained_agents: regular expression for the agents whose calls are trained; None for all.
            version: the learners' version before the update. It is read with `max_staleness`.
        """
        return BatchRules(
            rewards=self.reward_rules,
            min_group=self.min_group,
            trained_agents=trained_agents,
            zero_variance_groups=self.zero_variance_groups,
            row_limit=learner.row_limit,
            long_rows=learner.long_rows,
            baseline_kind=self.baseline_kind,
            off_policy_sampling=self.off_policy_sampling,
            train_auxiliary_calls=self.train_auxiliary_calls,
            trajectory_selection=self.trajectory_selection,
            replays_sampling=not self.has_teacher,
            models=self.trained_models,
            by_agent=self.credit == "agent",
            agent_weights=self.agent_weights,
            stale=StaleMask(version, self.max_staleness) if self.max_staleness else None,
            turn_groups=None if self.turn_advantage is None else self.turn_advantage.turn_groups,
        )


class GRPO(PolicyAlgorithm):
    """Group relative policy optimisation, https://arxiv.org/abs/2402.03300.

    The advantage of a rollout is its reward less the mean of its group, divided by the group's standard
    deviation. The loss is PPO's clipped objective.
    """

    group_size: int = Field(default=8, ge=2, le=MAX_SAMPLES)

    @model_validator(mode="after")
    def _check_advantage(self) -> Self:
        if not isinstance(self.advantage, GRPOAdvantage | UserAdvantage):
            raise ValueError(
                f"the advantage estimator {self.advantage.name!r} is not GRPO's; take its own algorithm, or "
                "VERL(config)"
            )
        return self
