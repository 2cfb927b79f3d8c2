"""The settings of a run, resolved and checked before anything starts."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass, field, replace
from typing import Any, Self

from raylight import __version__
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import NamedResources
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.algorithms.supervised import SupervisedAlgorithm
from raylight.components import IN_CODE
from raylight.config import (
    CheckpointConfig,
    EngineConfig,
    LearnerConfig,
    RunnerConfig,
    SessionConfig,
    StoreConfig,
)
from raylight.rewards.scoring_model import RewardModel
from raylight.runner.actor import RunnerPayload
from raylight.serving.gateway.sessions import SessionRules
from raylight.store.client import StoreClient
from raylight.types import RolloutConfig

MODEL_NAME = "policy"
"""The name under which a run serves its model."""
PACKAGES = ("ray", "torch", "transformers", "verl")
"""Required packages whose versions are part of a run's configuration."""


@dataclass(frozen=True)
class ServingSettings:
    """The model that a run serves."""

    model_path: str
    """Folder of the model; empty for an upstream model."""
    engine: EngineConfig
    name: str = MODEL_NAME
    """Model name that agents send."""
    route: str | None = None
    """HTTP route of the model; None derives it from the run's name."""
    sampling_parameters: dict[str, Any] = field(default_factory=dict)
    """Default sampling parameters of the model; an agent's own declaration wins."""
    sampling_overrides: dict[str, Any] = field(default_factory=dict)
    """Sampling parameters that win over an agent's own declaration."""
    training_temperature: float | None = None
    """Temperature of all calls of training rollouts; None leaves the sampling to the agents."""
    lora_adapter: str | None = None
    """Folder of a LoRA adapter in peft's format, which is served with the model."""
    session_rules: SessionRules | None = None
    """Rules of the sessions of agents outside the run; None: there are none."""
    lora_adapter_timeout_s: float = 120.0
    """Deadline for that adapter to reach every replica, in seconds."""


@dataclass(frozen=True)
class RewardModelSettings:
    """A reward model of the group reward, and the engine that scores by it."""

    model: RewardModel
    serving: ServingSettings


@dataclass(frozen=True)
class LearningSettings:
    """The training of a model by learners."""

    algorithm: PolicyAlgorithm | SupervisedAlgorithm
    learner: LearnerConfig
    checkpoint: CheckpointConfig
    state_url: str
    """Folder or URL of the training states."""
    total_steps: int


@dataclass(frozen=True)
class SupervisedTraining(LearningSettings):
    """The training of a model on given examples, without rollouts."""

    algorithm: SupervisedAlgorithm
    model_path: str
    """Folder of the initial model."""

    def resolved(self) -> dict[str, Any]:
        """Return this part of the run's resolved configuration."""
        return {
            "total_steps": self.total_steps,
            "algorithm": {
                "name": type(self.algorithm).__name__,
                **self.algorithm.arguments(),
                "model": self.model_path,
            },
            "learner": self.learner.model_dump(mode="json"),
            "checkpoint": self.checkpoint.model_dump(mode="json"),
        }


@dataclass(frozen=True)
class TrainingSettings(LearningSettings):
    """The training of the model that a run serves."""

    algorithm: PolicyAlgorithm
    trained_agents: str | None = None
    """Regular expression for the agents whose calls are trained on; None for all."""
    teacher: ServingSettings | None = None
    """The model that scores sampled tokens; None if there is none."""

    @property
    def serves_adapter(self) -> bool:
        """True if the engines serve the model with the learners' adapter."""
        learner = self.learner
        return learner.kind == "ranks" and learner.lora is not None and learner.lora.serve == "adapter"


@dataclass(frozen=True)
class ResolvedSettings:
    """All settings of a run. A part that is None is one that the run does not have."""

    name: str
    """Name of the run, of the Ray namespace of its actors, and of its Serve application."""
    folder: str
    """The run directory."""
    seed: int
    payload: RunnerPayload | None
    """The agent and what else the runners need to execute it; None for a run without rollouts."""
    runner: RunnerConfig
    store: StoreConfig | StoreClient
    """Settings of the run's own store, or an existing store, which outlives the run."""
    store_path: str
    resources: NamedResources
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Limits and retries of each rollout that the run itself enqueues."""
    serving: ServingSettings | None = None
    training: TrainingSettings | None = None
    sessions: SessionConfig | None = None
    """Settings of the sessions of agents outside the run, which then has no runners; None: it has runners."""
    group_reward: Any = None
    """Function of all finished rollouts of a group (see `raylight.rewards.group`); None if the agent's own
    rewards count."""
    reward_models: tuple[RewardModelSettings, ...] = ()
    """The reward models that the group reward calls."""
    supervised: SupervisedTraining | None = None

    @property
    def agent(self) -> LitAgent:
        """The agent of a run with rollouts."""
        assert self.payload is not None, "the run has agents"
        return self.payload.agent

    @property
    def learning(self) -> LearningSettings | None:
        """The training of a run that has learners."""
        return self.training or self.supervised

    @property
    def scoring_models(self) -> tuple[ServingSettings, ...]:
        """The fixed models that compute beside the served one: the teacher and the reward models."""
        teacher = None if self.training is None else self.training.teacher
        return (*(() if teacher is None else (teacher,)), *(one.serving for one in self.reward_models))

    @property
    def shares_gpus(self) -> bool:
        """True if learners and engines are on the same GPUs."""
        if self.serving is None or self.training is None:
            return False
        return 0 < self.training.learner.num_gpus < 1 and self.serving.engine.num_gpus > 0

    def with_engine(self, engine: EngineConfig) -> Self:
        """Return the settings of a run that serves a model, with another engine."""
        assert self.serving is not None, "the run serves a model"
        return replace(self, serving=replace(self.serving, engine=engine))

    def with_training(self, **changes: Any) -> Self:
        """Return the settings of a run that trains, with changes to its training."""
        assert self.training is not None, "the run trains"
        return replace(self, training=replace(self.training, **changes))

    def resolved(self) -> dict[str, Any]:
        """Return the run's resolved configuration."""
        content: dict[str, Any] = {"name": self.name}
        if self.supervised is not None:
            return (
                content | {"seed": self.seed} | self.supervised.resolved() | {"versions": package_versions()}
            )
        if (serving := self.serving) is not None:
            content["seed"] = self.seed
            if (training := self.training) is None:
                content["model"] = serving.model_path
            else:
                content["total_steps"] = training.total_steps
                content["algorithm"] = {
                    "name": type(training.algorithm).__name__,
                    **PolicyAlgorithm.arguments(training.algorithm),  # VERL's own are its configuration
                    "model": serving.model_path,
                }
                content["trained_agents"] = training.trained_agents
            content["engine"] = serving.engine.model_dump(mode="json")
            if training is not None:
                content["learner"] = training.learner.model_dump(mode="json")
                content["checkpoint"] = training.checkpoint.model_dump(mode="json")
        if self.reward_models:
            content["reward_models"] = [
                {"name": one.model.name} | one.model.config.model_dump(mode="json", exclude_unset=True)
                for one in self.reward_models
            ]
        return content | {
            "runner": self.runner.model_dump(mode="json"),
            "store": self.store.model_dump(mode="json") if isinstance(self.store, StoreConfig) else IN_CODE,
            "resources": sorted(self.resources),
            "versions": package_versions(),
        }


def package_versions() -> dict[str, str]:
    """Return the versions of raylight and of the packages that a run depends on."""
    return {"raylight": __version__} | {name: importlib.metadata.version(name) for name in PACKAGES}
