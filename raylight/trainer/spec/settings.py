"""The settings of a run, resolved and checked before anything starts."""

from __future__ import annotations

import functools
import importlib.metadata
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Self

from raylight import __version__
from raylight.agent.resources import NamedResources
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.algorithms.supervised import SupervisedAlgorithm
from raylight.algorithms.teacher import TeacherConfig
from raylight.components import IN_CODE
from raylight.config import (
    MODEL_NAME,
    CheckpointConfig,
    EngineConfig,
    LearnerConfig,
    LoraConfig,
    RunnerConfig,
    SessionConfig,
    StoreConfig,
)
from raylight.learner.protocol import LearnerSettings, ModelSettings
from raylight.rewards.group import GroupReward, identify
from raylight.rewards.scoring_model import ScoringModel
from raylight.runner.actor import RunnerPayload
from raylight.serving.gateway.session_service import SessionRules
from raylight.store.client import StoreClient
from raylight.types import JsonObject, RolloutConfig

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
    models: tuple[str, ...] = ()
    """Names of several models that the engines serve as adapters of this one; empty if there is one."""
    route: str | None = None
    """HTTP route of the model; None derives it from the run's name."""
    sampling_parameters: JsonObject = field(default_factory=dict)
    """Default sampling parameters of the model; an agent's own declaration wins."""
    sampling_overrides: JsonObject = field(default_factory=dict)
    """Sampling parameters that win over an agent's own declaration."""
    training_temperature: float | None = None
    """Temperature of all calls of training rollouts; None leaves the sampling to the agents."""
    lora_adapters: dict[str, str] = field(default_factory=dict)
    """Folders of LoRA adapters in peft's format, which are served with the model, by their names."""
    session_rules: SessionRules | None = None
    """Rules of the sessions of agents outside the run; None: there are none."""
    lora_adapter_timeout_s: float = 120.0
    """Deadline for that adapter to reach every replica, in seconds."""


@dataclass(frozen=True)
class RewardModelSettings:
    """A reward model of the group reward, and the engine that scores by it."""

    model: ScoringModel
    serving: ServingSettings


@dataclass(frozen=True)
class RankTeacher:
    """A teacher of a run that distils, on the learners' ranks."""

    config: TeacherConfig


@dataclass(frozen=True)
class ServedTeacher:
    """A teacher of a run that distils, and the engine that scores by it."""

    config: TeacherConfig
    serving: ServingSettings
    top_k: int | None = None
    """The teacher's most probable tokens that it gives; None: it scores the sampled ones."""
    aligned_to: str | None = None
    """Folder of the policy's initial model, if the teacher has other tokens; None: it has the same."""


TeacherSettings = RankTeacher | ServedTeacher


@dataclass(frozen=True)
class LearningSettings:
    """The training of a model by learners."""

    algorithm: PolicyAlgorithm | SupervisedAlgorithm
    learner: LearnerConfig
    checkpoint: CheckpointConfig
    state_url: str
    """Folder or URL of the training states."""
    total_steps: int

    @property
    def learner_settings(self) -> LearnerSettings:
        """Settings of the model, or of each of several, that the learners read."""
        return self.algorithm.policy_settings()

    def resolved(self, model_path: str) -> JsonObject:
        """Return the part of the run's resolved configuration that is about training.

        Args:
            model_path: folder of the initial model.
        """
        algorithm = self.algorithm
        own = algorithm.arguments()
        if isinstance(algorithm, PolicyAlgorithm):  # the arguments of VERL are its configuration
            own = PolicyAlgorithm.arguments(algorithm)
        return {
            "total_steps": self.total_steps,
            "algorithm": {"name": type(algorithm).__name__, **own, "model": model_path},
            "learner": self.learner.model_dump(mode="json"),
            "checkpoint": self.checkpoint.model_dump(mode="json"),
        }


@dataclass(frozen=True)
class SupervisedTraining(LearningSettings):
    """The training of a model on given examples, without rollouts."""

    algorithm: SupervisedAlgorithm
    model_path: str
    """Folder of the initial model."""


@dataclass(frozen=True)
class TrainingSettings(LearningSettings):
    """The training of the model that a run serves."""

    algorithm: PolicyAlgorithm
    trained_agents: str | None = None
    """Regular expression for the agents whose calls are trained on; None for all."""
    teachers: Mapping[str, TeacherSettings] = field(default_factory=dict)
    """The teachers by name."""

    @property
    def learner_settings(self) -> LearnerSettings:
        algorithm = self.algorithm
        if not algorithm.models:
            return algorithm.policy_settings()
        return {
            name: ModelSettings(algorithm.policy_settings(name), model.adapter)
            for name, model in algorithm.models.items()
        }

    @property
    def served_teachers(self) -> tuple[ServedTeacher, ...]:
        """The teachers that have dedicated engines."""
        return tuple(one for one in self.teachers.values() if isinstance(one, ServedTeacher))

    @property
    def served_lora(self) -> LoraConfig | None:
        """The adapter that the engines serve on the initial model; None if they serve full weights."""
        learner = self.learner
        is_served = learner.kind == "ranks" and learner.lora is not None and learner.lora.serve == "adapter"
        return learner.lora if is_served else None

    @property
    def adapters(self) -> dict[str, str]:
        """Names of the learners' models by the names of their served adapters; empty if engines serve full
        weights. The learners name a run's only model ''."""
        if self.algorithm.models:
            return {name: name for name in self.algorithm.models}
        return {MODEL_NAME: ""} if self.served_lora is not None else {}


@dataclass(frozen=True, kw_only=True)
class CommonSettings(ABC):
    """Settings that every run has."""

    name: str
    """Name of the run, of the Ray namespace of its actors, and of its Serve application."""
    folder: str
    """The run directory."""
    seed: int
    runner: RunnerConfig = field(default_factory=RunnerConfig)
    """Settings of the runners. `start_timeout_s` is also the deadline of the connection to Ray."""

    @classmethod
    def extending(cls, base: CommonSettings, **others: object) -> Self:
        """Return the settings of `base` with those that this class has too, or that replace them."""
        return cls(**{part.name: getattr(base, part.name) for part in fields(base)} | others)

    @property
    def folders(self) -> dict[str, Path]:
        """Folders that must be writable, by the names of their settings."""
        return {"output_dir": Path(self.folder)}

    @abstractmethod
    def resolved(self) -> JsonObject:
        """Return the run's resolved configuration."""


@dataclass(frozen=True, kw_only=True)
class SupervisedRunSettings(CommonSettings):
    """Settings of a run that trains a model on given examples."""

    training: SupervisedTraining

    def resolved(self) -> JsonObject:
        training = self.training.resolved(self.training.model_path)
        return {"name": self.name, "seed": self.seed, **training, "versions": package_versions()}


@dataclass(frozen=True, kw_only=True)
class RolloutSettings(CommonSettings):
    """Settings of a run with rollouts."""

    agents: RunnerPayload | SessionConfig
    """The agent and what else the runners need to execute it; or the settings of the sessions of agents
    outside the run, which then has no runners."""
    secret: str
    """Secret from which the API keys of attempts are derived."""
    store: StoreConfig | StoreClient
    """Settings of the run's own store, or an existing store, which outlives the run."""
    store_path: str
    resources: NamedResources
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    """Limits and retries of each rollout that the run itself enqueues."""
    group_reward: GroupReward | None = None
    """Function of all finished rollouts of a group; None if the agent's own rewards count."""
    reward_models: tuple[RewardModelSettings, ...] = ()
    """The reward models that the group reward calls."""
    serving: ServingSettings | None
    """The model that the run serves; None if it serves none."""

    @property
    def folders(self) -> dict[str, Path]:
        return super().folders | {"store.path": Path(self.store_path).parent}

    @property
    def scoring_models(self) -> tuple[ServingSettings, ...]:
        """The fixed models that score for the served one."""
        return tuple(one.serving for one in self.reward_models)

    def resolved(self) -> JsonObject:
        content: JsonObject = {"name": self.name} | self._resolved_model()
        content["group_reward"] = None if self.group_reward is None else identify(self.group_reward)
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

    def _resolved_model(self) -> JsonObject:
        """Return the part of the resolved configuration that is about the served model."""
        return {}


@dataclass(frozen=True, kw_only=True)
class ServedSettings(RolloutSettings):
    """Settings of a run that serves a model."""

    serving: ServingSettings

    def _resolved_model(self) -> JsonObject:
        return {
            "seed": self.seed,
            "model": self.serving.model_path,
            "engine": self.serving.engine.model_dump(mode="json"),
        }


@dataclass(frozen=True, kw_only=True)
class TrainedSettings(ServedSettings):
    """Settings of a run that trains the model that it serves."""

    training: TrainingSettings

    @property
    def scoring_models(self) -> tuple[ServingSettings, ...]:
        """The teachers and the reward models."""
        return (*(one.serving for one in self.training.served_teachers), *super().scoring_models)

    @property
    def shares_gpus(self) -> bool:
        """True if learners and engines are on the same GPUs."""
        return 0 < self.training.learner.num_gpus < 1 and self.serving.engine.num_gpus > 0

    def _resolved_model(self) -> JsonObject:
        training = self.training
        return {
            "seed": self.seed,
            "engine": self.serving.engine.model_dump(mode="json"),
            "trained_agents": training.trained_agents,
            **training.resolved(self.serving.model_path),
        }


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the versions of raylight and of the packages that a run depends on."""
    return {"raylight": __version__} | {name: importlib.metadata.version(name) for name in PACKAGES}
