"""The plan of a run: its components and settings, resolved and checked before anything starts."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM, NamedResources
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.config import CheckpointConfig, EngineConfig, LearnerConfig, RunnerConfig, StoreConfig
from raylight.errors import ConfigError
from raylight.runner.actor import RunnerPayload
from raylight.store.client import StoreClient
from raylight.trainer.run_file import IN_CODE
from raylight.types import RolloutConfig

RESERVED = {"task", "rollout", "resources"}
"""Names of a rollout function's parameters that raylight fills itself."""
MODEL_NAME = "policy"
"""The name under which the trained model is served."""


@dataclass(frozen=True)
class RunPlan:
    """The components of a run."""

    name: str
    """Name of the run, of the Ray namespace of its actors, and of its Serve application."""
    payload: RunnerPayload
    """The agent and what else the runners need to execute it."""
    runner: RunnerConfig
    store: StoreConfig | StoreClient
    """Settings of the run's own store, or an existing store, which outlives the run."""
    store_path: str
    resources: NamedResources

    def resolved(self) -> dict[str, Any]:
        """Return the run's resolved configuration."""
        return {
            "name": self.name,
            "runner": self.runner.model_dump(mode="json"),
            "store": self.store.model_dump(mode="json") if isinstance(self.store, StoreConfig) else IN_CODE,
            "resources": sorted(self.resources),
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("raylight", "ray", "torch", "transformers", "verl")
            },
        }


@dataclass(frozen=True)
class ServedPlan(RunPlan):
    """The components of a run that serves a model to agents."""

    model_path: str
    engine: EngineConfig
    seed: int

    @property
    def rollout(self) -> RolloutConfig:
        """Limits and retries of each rollout."""
        raise NotImplementedError


@dataclass(frozen=True)
class PolicyPlan(ServedPlan):
    """The components of a run that trains a policy."""

    algorithm: PolicyAlgorithm
    learner: LearnerConfig
    checkpoint: CheckpointConfig
    output_dir: str
    """The run directory."""
    state_url: str
    """Folder or URL of the training states."""
    total_steps: int
    trained_agents: str | None
    """Regular expression for the agents whose calls are trained on; None for all."""

    @property
    def rollout(self) -> RolloutConfig:
        return self.algorithm.rollout

    @property
    def shares_gpus(self) -> bool:
        """True if learners and engines are on the same GPUs."""
        return 0 < self.learner.num_gpus < 1 and self.engine.num_gpus > 0

    @property
    def serves_adapter(self) -> bool:
        """True if the engines serve the model with the learners' adapter."""
        return self.learner.lora is not None and self.learner.lora.serve == "adapter"

    def resolved(self) -> dict[str, Any]:
        algorithm = PolicyAlgorithm.arguments(self.algorithm)
        common = super().resolved()
        return {
            "name": common.pop("name"),
            "seed": self.seed,
            "total_steps": self.total_steps,
            "algorithm": {"name": type(self.algorithm).__name__, **algorithm, "model": self.model_path},
            "trained_agents": self.trained_agents,
            "engine": self.engine.model_dump(mode="json"),
            "learner": self.learner.model_dump(mode="json"),
            "checkpoint": self.checkpoint.model_dump(mode="json"),
            **common,
        }


def merge_resources(agent: LitAgent, overrides: NamedResources) -> NamedResources:
    """Return the resources that the agent declares, overridden by those of the Trainer.

    Raises:
        ConfigError: a resource has one of the names in `RESERVED`.
    """
    resources = {**agent.declared_resources, **overrides}
    if reserved := RESERVED & resources.keys():
        raise ConfigError(
            f"resources cannot be named {', '.join(sorted(reserved))}: raylight fills these parameters "
            "itself; choose other names"
        )
    return resources


def with_policy(resources: NamedResources, llm: LLM) -> NamedResources:
    """Return resources in which the served model `llm` takes the place of every model without an endpoint.

    If there is none, it is added as `llm`, and also as `main_llm` (the name in agent-lightning's VERL) unless
    that name is taken.

    Raises:
        ConfigError: the resource `llm` is a model with an endpoint, and no other model lacks one.
    """
    unfilled = [name for name, value in resources.items() if is_unfilled(value)]
    if not unfilled and "llm" in resources:
        raise ConfigError(
            "the resource `llm` has an endpoint, and no resource is left for the trained model; give the "
            "fixed model another name, or declare a model without an endpoint, such as @rollout(model=LLM())"
        )
    kept = ("sampling_parameters", "agent_id")
    filled = {
        name: llm.model_copy(update={field: getattr(resources[name], field) for field in kept})
        for name in unfilled
    }
    return resources | filled if filled else {"main_llm": llm} | resources | {"llm": llm}


def with_sampling(resources: NamedResources, parameters: dict[str, Any]) -> NamedResources:
    """Return resources whose trained model has other sampling parameters; those not named stay."""
    return {
        name: value.model_copy(update={"sampling_parameters": value.sampling_parameters | parameters})
        if isinstance(value, LLM) and value.traced and value.model == MODEL_NAME
        else value
        for name, value in resources.items()
    }


def is_unfilled(resource: Any) -> bool:
    """Return True for a model without an endpoint, which the run fills with the model that it serves."""
    return isinstance(resource, LLM) and not resource.endpoint and not resource.tokenizer_only


def must_have_endpoints(resources: Iterable[tuple[str, Any]], algorithm: Any) -> None:
    """Raise a ConfigError if a model has no endpoint in a run that serves none."""
    if empty := [name for name, resource in resources if is_unfilled(resource)]:
        raise ConfigError(
            f"{', '.join(empty)}: {type(algorithm).__name__} serves no model, and this LLM has no endpoint; "
            "give one: LLM(endpoint=..., model=...)"
        )
