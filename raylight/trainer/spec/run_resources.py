"""Resources of a run: the agent's and the Trainer's, with the model that the run serves among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from raylight.agent.decorators import BUILTIN_PARAMETERS
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM, NamedResources
from raylight.errors import ConfigError
from raylight.experience.opponents import OPPONENT
from raylight.types import JsonObject


def merge_resources(agent: LitAgent, overrides: NamedResources) -> NamedResources:
    """Return the resources that the agent declares, overridden by the Trainer's.

    Raises:
        ConfigError: a resource has one of the names in `BUILTIN_PARAMETERS`.
    """
    resources = {**agent.declared_resources, **overrides}
    if reserved := BUILTIN_PARAMETERS & resources.keys():
        raise ConfigError(
            f"resources cannot be named {', '.join(sorted(reserved))}: raylight fills these parameters "
            "itself; choose other names"
        )
    return resources


def with_policy(resources: NamedResources, llm: LLM, models: Sequence[str] = ()) -> NamedResources:
    """Return resources in which the served model `llm` takes the place of every model without an endpoint.

    If there is none, it is added as `llm`, and also as `main_llm` (the name in agent-lightning's VERL) unless
    that name is taken. Of several models, the one that the resource names takes its place, or else the one
    with the name of the resource; if there is no such resource, each is added under its name too.

    Args:
        models: names of the served models; empty if there is one.

    Raises:
        ConfigError: the resource `llm` is a model with an endpoint, and no other model lacks one; or a model
            without an endpoint is none of several models; or none is the opponent that the run serves.
    """
    unfilled = [name for name, value in resources.items() if is_unfilled(value)]
    if not unfilled and "llm" in resources:
        raise ConfigError(
            "the resource `llm` has an endpoint, and no resource is left for the trained model; give the "
            "fixed model another name, or declare a model without an endpoint, such as @rollout(model=LLM())"
        )
    kept = ("sampling_parameters", "agent_id")
    filled = {
        name: _named(llm, name, resources[name].model, models).model_copy(
            update={field: getattr(resources[name], field) for field in kept}
        )
        for name in unfilled
    }
    if filled:
        found = resources | filled
    else:
        named = {name: llm.model_copy(update={"model": name}) for name in models}
        llm = next(iter(named.values()), llm)
        found = {"main_llm": llm} | named | resources | {"llm": llm}
    _check_opponent(found, llm, models)
    return found


def _check_opponent(resources: NamedResources, llm: LLM, models: Sequence[str]) -> None:
    """Check that the agent can call the opponents of a run that has some.

    Raises:
        ConfigError: it declares other models only.
    """
    models_of_agent = [value for value in resources.values() if isinstance(value, LLM)]
    served = {value.model for value in models_of_agent if value.endpoint == llm.endpoint}
    if OPPONENT in models and OPPONENT not in served:
        raise ConfigError(
            f"opponents: none of the agent's models is the `{OPPONENT}`, so that no rollout would meet one; "
            f"declare it without an endpoint: @rollout({OPPONENT}=LLM())"
        )


def _named(llm: LLM, resource: str, model: str, models: Sequence[str]) -> LLM:
    if not models:
        return llm
    found = next((name for name in (model, resource) if name in models), None)
    if found is None and llm.model in models:  # the policy, which has opponents
        return llm
    if found is None:
        raise ConfigError(
            f"the resource `{resource}` names none of the run's models, which are {', '.join(models)}; "
            f"declare it with a name, such as @rollout({resource}=LLM(name={models[0]!r}))"
        )
    return llm.model_copy(update={"model": found})


def with_sampling(
    resources: NamedResources, parameters: JsonObject, models: Mapping[str, str]
) -> NamedResources:
    """Return resources whose served models have other sampling parameters; those not named stay.

    Args:
        models: name under which each of these models is served instead.
    """
    return {
        name: value.model_copy(
            update={
                "sampling_parameters": value.sampling_parameters | parameters,
                "model": models[value.model],
            }
        )
        if isinstance(value, LLM) and value.traced and value.model in models
        else value
        for name, value in resources.items()
    }


def is_unfilled(resource: object) -> bool:
    """Return True for a model without an endpoint, which the run fills with the model that it serves."""
    return isinstance(resource, LLM) and not resource.endpoint and not resource.tokenizer_only


def must_have_endpoints(resources: Iterable[tuple[str, object]], algorithm: object) -> None:
    """Raise a ConfigError if a model has no endpoint in a run that serves none."""
    if empty := [name for name, resource in resources if is_unfilled(resource)]:
        raise ConfigError(
            f"{', '.join(empty)}: {type(algorithm).__name__} serves no model, and this LLM has no endpoint; "
            "give one: LLM(endpoint=..., model=...)"
        )
