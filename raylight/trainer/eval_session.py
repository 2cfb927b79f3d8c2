"""The components of a run that scores a model: a store, runners and engines, and no learner."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from pydantic import Field

from raylight.agent.resources import LLM, NamedResources
from raylight.config import Config
from raylight.engines.protocol import LoraAdapter
from raylight.errors import ModelNotFoundError
from raylight.trainer.plan import MODEL_NAME, ServedPlan, with_policy
from raylight.trainer.served_session import ServedSession
from raylight.types import RolloutConfig

ADAPTER_NAME = "adapter"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class EvalSettings(Config):
    """What is scored, and how."""

    model: str
    """Folder of a Hugging Face model, or the name of one in the local cache; with an upstream engine its name there."""
    lora_adapter: str | None = None
    """Folder of a LoRA adapter in peft's format, with which the model is served."""
    samples: int = Field(default=1, ge=1)
    """Rollouts of each task."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """What agents find in `llm.sampling_parameters`, such as `{"temperature": 0.0}`. It is up to them to pass it on."""
    failure_reward: float | None = Field(default=None, allow_inf_nan=False)
    """Reward of a rollout whose agent failed; None leaves it out. Failures of the infrastructure are always left out."""
    pass_reward: float = Field(default=1.0, allow_inf_nan=False)
    """Reward from which a rollout passes, for pass@k."""
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig(timeout_seconds=600.0))
    """Limits and retries of each rollout."""
    lora_adapter_timeout_s: float = Field(default=120.0, gt=0)
    """Deadline for the adapter to reach every engine."""


@dataclass(frozen=True)
class EvalPlan(ServedPlan):
    """The components of a run that scores a model."""

    settings: EvalSettings
    n_tasks: int

    @property
    def rollout(self) -> RolloutConfig:
        return self.settings.rollout

    def resolved(self) -> dict[str, Any]:
        common, settings = super().resolved(), self.settings.model_dump(mode="json")
        settings["rollout"]["retry_condition"] = sorted(settings["rollout"]["retry_condition"])
        settings["model"] = self.model_path or settings["model"]
        engine = self.engine.model_dump(mode="json")
        return {
            "name": common.pop("name"),
            "seed": self.seed,
            **settings,
            "tasks": self.n_tasks,
            "engine": engine,
            **common,
        }


class EvalSession(ServedSession):
    """A ServedSession whose model may have an adapter."""

    plan: EvalPlan

    async def _served_name(self) -> str:
        settings = self.plan.settings
        if settings.lora_adapter is None:
            return MODEL_NAME
        box = [ray.put(read_adapter(settings.lora_adapter))]
        await self.fleet.publish(1, box, settings.lora_adapter_timeout_s, adapter=ADAPTER_NAME)
        return ADAPTER_NAME

    def _resources_with(self, llm: LLM) -> NamedResources:
        resources = with_policy(self.resources, llm)
        for name, resource in resources.items():
            if isinstance(resource, LLM) and resource.endpoint == llm.endpoint:
                parameters = resource.sampling_parameters | self.plan.settings.sampling
                resources[name] = resource.model_copy(update={"sampling_parameters": parameters})
        return resources


def find_adapter(folder: str) -> str:
    """The folder of a peft adapter.

    Raises:
        ModelNotFoundError: there is no such folder, or it holds no adapter.
    """
    path = os.path.abspath(os.path.expanduser(folder))
    if not os.path.isdir(path):
        raise ModelNotFoundError(f"there is no adapter folder {path}")
    if missing := [name for name in ADAPTER_FILES if not os.path.isfile(os.path.join(path, name))]:
        raise ModelNotFoundError(
            f"{path} holds no LoRA adapter as peft saves it: {', '.join(missing)} is missing"
        )
    return path


def read_adapter(folder: str) -> LoraAdapter:
    """An adapter from the folder where peft saved it."""
    from safetensors.torch import load_file

    config, weights = (os.path.join(folder, name) for name in ADAPTER_FILES)
    return LoraAdapter(json.loads(Path(config).read_text()), load_file(weights))
