"""Settings of runs, and facts of a cluster, for tests."""

from typing import Any

from raylight.agent.decorators import rollout
from raylight.algorithms.policy import GRPO
from raylight.config import CheckpointConfig, EngineConfig, LearnerConfig, RunnerConfig, StoreConfig
from raylight.runner.actor import RunnerPayload
from raylight.trainer.cluster_fit.hardware import ClusterFacts, Hardware
from raylight.trainer.spec.settings import (
    RolloutSettings,
    ServedSettings,
    ServingSettings,
    TrainedSettings,
    TrainingSettings,
)


class KnownFacts(ClusterFacts):
    """Facts of a cluster with so many GPUs, which is not asked."""

    def __init__(self, gpus: float = 0.0) -> None:
        self.resources, self.hardware = {"CPU": 2.0, "GPU": gpus}, Hardware(gpus)
        self.cores = 2

    def engine_on_nodes(self, requested: EngineConfig, engine: EngineConfig) -> EngineConfig:
        return engine

    def check_image_scaling(self, model_path: str, *parts: EngineConfig | LearnerConfig) -> None: ...


def _common(settings: dict[str, Any]) -> dict[str, Any]:
    defaults = {
        "name": "run-1",
        "folder": "out",
        "seed": 0,
        "agents": RunnerPayload(rollout(lambda task: 1.0), secret="s3cr3t"),
        "secret": "s3cr3t",
        "runner": RunnerConfig(),
        "store": StoreConfig(),
        "store_path": "store.db",
        "resources": {},
    }
    return defaults | settings


def make_settings(**settings: Any) -> RolloutSettings:
    """Return the settings of a run that serves nothing."""
    return RolloutSettings(serving=None, **_common(settings))


def served_settings(model_path: str, engine: EngineConfig | None = None, **settings: Any) -> ServedSettings:
    """Return the settings of a run that serves a fixed model."""
    return ServedSettings(serving=ServingSettings(model_path, engine or EngineConfig()), **_common(settings))


def policy_settings(
    model_path: str,
    engine: EngineConfig | None = None,
    learner: LearnerConfig | None = None,
    algorithm: Any = None,
    training: dict[str, Any] | None = None,
    **settings: Any,
) -> TrainedSettings:
    """Return the settings of a run that trains."""
    parts = {
        "algorithm": algorithm or GRPO(model="m"),
        "learner": learner or LearnerConfig(),
        "checkpoint": CheckpointConfig(),
        "state_url": "state",
        "total_steps": 1,
    }
    serving = ServingSettings(model_path, engine or EngineConfig())
    part = TrainingSettings(**parts | (training or {}))
    return TrainedSettings(serving=serving, training=part, **_common(settings))
