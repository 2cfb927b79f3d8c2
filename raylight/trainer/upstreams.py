"""Fixed models that a run traces too: a user simulator, a judge. Each is passed on by a replica of its own."""

from __future__ import annotations

import contextlib
from typing import Any

import ray

from raylight.agent.resources import LLM, NamedResources, ProxyLLM
from raylight.config import EngineConfig
from raylight.serving.deploy.deployment import Deployment
from raylight.serving.deploy.replica import ReplicaSettings
from raylight.store.client import StoreClient
from raylight.weight_sync.coordinator import start_coordinator


def is_traced_upstream(resource: Any) -> bool:
    """Whether a resource is a model elsewhere whose calls are to be recorded: `LLM(endpoint=..., traced=True)`."""
    return (
        isinstance(resource, LLM)
        and not isinstance(resource, ProxyLLM)
        and resource.traced
        and bool(resource.endpoint)
    )


async def serve_upstreams(
    resources: NamedResources,
    run: str,
    secret: str,
    store: StoreClient,
    cluster_ends: bool,
    stack: contextlib.AsyncExitStack,
) -> NamedResources:
    """Put a recording replica in front of each traced model that is elsewhere; returns the resources with their new addresses.

    Args:
        stack: takes them down again.
    """
    chosen = {name: value for name, value in resources.items() if is_traced_upstream(value)}
    served = {}
    for name, llm in chosen.items():  # one after the other: the first may have to start Serve
        served[name] = await _serve(f"{run}-{name}", llm, secret, store, cluster_ends, stack)
    return resources | served


async def _serve(
    app_name: str,
    llm: LLM,
    secret: str,
    store: StoreClient,
    cluster_ends: bool,
    stack: contextlib.AsyncExitStack,
) -> LLM:
    coordinator = start_coordinator(app_name, store)
    stack.callback(ray.kill, coordinator)
    config = EngineConfig.parse({}, kind="upstream", url=llm.endpoint, api_key=llm.api_key, num_cpus=0)
    spec = ReplicaSettings(
        app_name=app_name,
        model_path="",
        model=llm.model,
        config=config,
        secret=secret,
        seed=0,
        store=store,
        coordinator=coordinator,
    )
    deployment = Deployment(spec, cluster_ends)
    stack.push_async_callback(deployment.stop)
    url = await deployment.start()
    return llm.model_copy(update={"endpoint": url, "api_key": None})
