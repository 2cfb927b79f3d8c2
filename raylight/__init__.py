"""raylight: train existing AI agents with reinforcement learning on Ray, without changing the agent.

Names are loaded where they are first used, so that importing the package is quick and brings neither torch nor Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raylight.agent.litagent import LitAgent, rollout
    from raylight.agent.resources import LLM, NamedResources
    from raylight.algorithms.policy import GRPO
    from raylight.config import EngineConfig, LearnerConfig, RunnerConfig
    from raylight.errors import RaylightError
    from raylight.trainer.trainer import Trainer
    from raylight.types import Attempt, Rollout, RolloutConfig, Span, find_final_reward

_HOMES = {
    "LitAgent": "raylight.agent.litagent",
    "rollout": "raylight.agent.litagent",
    "LLM": "raylight.agent.resources",
    "NamedResources": "raylight.agent.resources",
    "GRPO": "raylight.algorithms.policy",
    "EngineConfig": "raylight.config",
    "LearnerConfig": "raylight.config",
    "RunnerConfig": "raylight.config",
    "RaylightError": "raylight.errors",
    "Trainer": "raylight.trainer.trainer",
    "Attempt": "raylight.types",
    "Rollout": "raylight.types",
    "RolloutConfig": "raylight.types",
    "Span": "raylight.types",
    "find_final_reward": "raylight.types",
}

__version__ = "0.1.0"
__all__ = [
    "GRPO",
    "LLM",
    "Attempt",
    "EngineConfig",
    "LearnerConfig",
    "LitAgent",
    "NamedResources",
    "RaylightError",
    "Rollout",
    "RolloutConfig",
    "RunnerConfig",
    "Span",
    "Trainer",
    "find_final_reward",
    "rollout",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raylight' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
