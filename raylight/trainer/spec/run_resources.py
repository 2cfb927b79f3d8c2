"""The resources of a run: those of agent and Trainer, with the model that the run serves among them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM, NamedResources
from raylight.errors import ConfigError
from raylight.trainer.spec.settings import MODEL_NAME

RESERVED = {"task", "rollout", "resources"}
"""Names of a rollout function's parameters that raylight fills itself."""


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


def with_sampling(
    resources: NamedResources, parameters: dict[str, Any], model: str = MODEL_NAME
) -> NamedResources:
    """Return resources whose trained model has other sampling parameters; those not named stay.

    Args:
        model: name under which the trained model is served.
    """
    return {
        name: value.model_copy(
            update={"sampling_parameters": value.sampling_parameters | parameters, "model": model}
        )
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
