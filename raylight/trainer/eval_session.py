"""The components of a run that scores a model: store, runners and engines, but no learners."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from pydantic import Field, field_validator

from raylight.agent.resources import LLM, NamedResources, check_sampling
from raylight.bounds import MAX_SAMPLES, MAX_SECONDS
from raylight.config import Config
from raylight.engines.protocol import LoraAdapter
from raylight.errors import ModelNotFoundError
from raylight.traces.rewards import MAX_REWARD
from raylight.trainer.plan import MODEL_NAME, ServedPlan, with_policy
from raylight.trainer.served_session import ServedSession
from raylight.types import RolloutConfig

ADAPTER_NAME = "adapter"
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


class EvalSettings(Config):
    """Settings of an evaluation."""

    model: str
    """Folder of a Hugging Face model, its name in the local cache, or the upstream's name of it."""
    lora_adapter: str | None = None
    """Folder of a LoRA adapter in peft's format, which is served with the model."""
    samples: int = Field(default=1, ge=1, le=MAX_SAMPLES)
    """Rollouts per task."""
    sampling: dict[str, Any] = Field(default_factory=dict)
    """Content of `llm.sampling_parameters`, such as `{"temperature": 0.0}`. Agents must pass it to their
    client themselves."""
    failure_reward: float | None = Field(default=None, ge=-MAX_REWARD, le=MAX_REWARD)
    """Reward of a rollout whose agent failed; None leaves it out. Infrastructure failures are always left
    out."""
    pass_reward: float = Field(default=1.0, ge=-MAX_REWARD, le=MAX_REWARD)
    """Lowest reward with which a rollout passes, for pass@k."""
    rollout: RolloutConfig = Field(default_factory=lambda: RolloutConfig(timeout_seconds=600.0))
    """Limits and retries of each rollout."""
    lora_adapter_timeout_s: float = Field(default=120.0, gt=0, le=MAX_SECONDS)
    """Deadline for the adapter to reach every replica, in seconds."""

    _check_sampling = field_validator("sampling")(check_sampling)


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
    """A ServedSession that may serve a LoRA adapter with its model."""

    plan: EvalPlan

    async def _served_name(self) -> str:
        settings = self.plan.settings
        if settings.lora_adapter is None:
            return MODEL_NAME
        payload_refs = [ray.put(read_adapter(settings.lora_adapter))]
        await self.replicas.publish(1, payload_refs, settings.lora_adapter_timeout_s, adapter=ADAPTER_NAME)
        return ADAPTER_NAME

    def _resources_with(self, llm: LLM) -> NamedResources:
        resources = with_policy(self.resources, llm)
        for name, resource in resources.items():
            if isinstance(resource, LLM) and resource.endpoint == llm.endpoint:
                parameters = resource.sampling_parameters | self.plan.settings.sampling
                resources[name] = resource.model_copy(update={"sampling_parameters": parameters})
        return resources


def find_adapter(folder: str) -> str:
    """Return the absolute path of a peft adapter's folder.

    Raises:
        ModelNotFoundError: there is no such folder, or it contains no adapter.
    """
    path = os.path.abspath(os.path.expanduser(folder))
    if not os.path.isdir(path):
        raise ModelNotFoundError(
            f"there is no adapter folder {path}; give the folder to which peft saved the adapter"
        )
    if missing := [name for name in ADAPTER_FILES if not os.path.isfile(os.path.join(path, name))]:
        raise ModelNotFoundError(
            f"{path} is not a LoRA adapter in peft's format: {', '.join(missing)} is missing"
        )
    return path


def read_adapter(folder: str) -> LoraAdapter:
    """Read an adapter in peft's format."""
    from safetensors.torch import load_file

    config, weights = (os.path.join(folder, name) for name in ADAPTER_FILES)
    return LoraAdapter(json.loads(Path(config).read_text()), load_file(weights))
