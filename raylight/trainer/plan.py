"""What a run is made of, resolved and checked before anything starts."""

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
from raylight.runner.pool import RunnerPayload
from raylight.store.client import StoreClient
from raylight.types import RolloutConfig

RESERVED = {"task", "rollout", "resources"}
"""Names that a rollout function's parameters have from raylight."""
MODEL_NAME = "policy"
"""The name under which the trained model is served."""


@dataclass(frozen=True)
class RunPlan:
    """The components of a run."""

    name: str
    """Also the Ray namespace of its actors and the name of its Serve application."""
    payload: RunnerPayload
    """What the runners execute."""
    runner: RunnerConfig
    store: StoreConfig | StoreClient
    """Settings of the run's own store, or one that is there already and outlives the run."""
    store_path: str
    resources: NamedResources

    def resolved(self) -> dict[str, Any]:
        """The run's configuration, for config.yaml."""
        return {
            "name": self.name,
            "runner": self.runner.model_dump(mode="json"),
            "store": self.store.model_dump(mode="json") if isinstance(self.store, StoreConfig) else "given",
            "resources": sorted(self.resources),
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("raylight", "ray", "torch", "transformers", "verl")
            },
        }


@dataclass(frozen=True)
class ServedPlan(RunPlan):
    """And those of a run that serves a model to agents."""

    model_path: str
    engine: EngineConfig
    seed: int

    @property
    def rollout(self) -> RolloutConfig:
        """Limits and retries of each rollout."""
        raise NotImplementedError


@dataclass(frozen=True)
class PolicyPlan(ServedPlan):
    """And those of a run that trains a policy."""

    algorithm: PolicyAlgorithm
    learner: LearnerConfig
    checkpoint: CheckpointConfig
    state_url: str
    """Where training states are."""
    total_steps: int
    trained_agents: str | None
    """Regular expression for the agents whose calls are trained."""

    @property
    def rollout(self) -> RolloutConfig:
        return self.algorithm.rollout

    def resolved(self) -> dict[str, Any]:
        algorithm = self.algorithm.model_dump(mode="json")
        algorithm["rollout"]["retry_condition"] = sorted(algorithm["rollout"]["retry_condition"])
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


def merge_resources(agent: LitAgent, given: NamedResources) -> NamedResources:
    """The resources that an agent declares, and over them those that the Trainer was given.

    Raises:
        ConfigError: one has a name that raylight gives itself.
    """
    resources = {**agent.declared_resources, **given}
    if taken := RESERVED & resources.keys():
        raise ConfigError(
            f"resources cannot be named {', '.join(sorted(taken))}; raylight gives these itself"
        )
    return resources


def with_policy(resources: NamedResources, llm: LLM) -> NamedResources:
    """Resources in which every model without an endpoint is the one that is trained; without any, it is added as `llm` and, as
    agents written for agent-lightning's VERL expect, as `main_llm`, unless something else is called so.

    Raises:
        ConfigError: `llm` is another model's name.
    """
    open_slots = [name for name, value in resources.items() if is_open(value)]
    if not open_slots and "llm" in resources:
        raise ConfigError(
            "the resource `llm` has an endpoint of its own, so that nothing is left for the model being trained; give the fixed "
            "model another name, or declare one without an endpoint, such as @rollout(model=LLM(name=...))"
        )
    kept = ("sampling_parameters", "agent_id")
    filled = {
        name: llm.model_copy(update={field: getattr(resources[name], field) for field in kept})
        for name in open_slots
    }
    return resources | filled if filled else {"main_llm": llm} | resources | {"llm": llm}


def with_greedy(resources: NamedResources) -> NamedResources:
    """Resources in which the model that is trained says to take the most probable tokens."""
    return {
        name: value.model_copy(
            update={"sampling_parameters": value.sampling_parameters | {"temperature": 0.0}}
        )
        if isinstance(value, LLM) and value.traced and value.model == MODEL_NAME
        else value
        for name, value in resources.items()
    }


def is_open(resource: Any) -> bool:
    """Whether a resource is a model that the serving side is to fill."""
    return isinstance(resource, LLM) and not resource.endpoint and not resource.tokenizer_only


def must_have_endpoints(resources: Iterable[tuple[str, Any]], algorithm: Any) -> None:
    """Raise ConfigError for a model that nothing serves."""
    if empty := [name for name, resource in resources if is_open(resource)]:
        raise ConfigError(
            f"{', '.join(empty)}: {type(algorithm).__name__} serves no model, so that an LLM needs its endpoint: LLM(endpoint=..., "
            "model=...)"
        )
