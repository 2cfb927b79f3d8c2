"""Resolved settings of runs, for tests."""

from __future__ import annotations

from typing import Any

from raylight.agent.decorators import rollout
from raylight.algorithms.policy import GRPO
from raylight.config import CheckpointConfig, EngineConfig, LearnerConfig, RunnerConfig, StoreConfig
from raylight.runner.actor import RunnerPayload
from raylight.trainer.spec.settings import ResolvedSettings, ServingSettings, TrainingSettings


def make_settings(**settings: Any) -> ResolvedSettings:
    """Return the settings of a run that serves nothing."""
    defaults = {
        "name": "run-1",
        "folder": "out",
        "seed": 0,
        "payload": RunnerPayload(rollout(lambda task: 1.0), secret="s3cr3t"),
        "runner": RunnerConfig(),
        "store": StoreConfig(),
        "store_path": "store.db",
        "resources": {},
    }
    return ResolvedSettings(**defaults | settings)


def served_settings(model_path: str, engine: EngineConfig | None = None, **settings: Any) -> ResolvedSettings:
    """Return the settings of a run that serves a fixed model."""
    return make_settings(serving=ServingSettings(model_path, engine or EngineConfig()), **settings)


def policy_settings(
    model_path: str,
    engine: EngineConfig | None = None,
    learner: LearnerConfig | None = None,
    algorithm: Any = None,
    training: dict[str, Any] | None = None,
    **settings: Any,
) -> ResolvedSettings:
    """Return the settings of a run that trains."""
    parts = {
        "algorithm": algorithm or GRPO(model="m"),
        "learner": learner or LearnerConfig(),
        "checkpoint": CheckpointConfig(),
        "state_url": "state",
        "total_steps": 1,
    }
    part = TrainingSettings(**parts | (training or {}))
    return served_settings(model_path, engine, training=part, **settings)
