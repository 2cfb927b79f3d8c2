"""Fixed upstream models whose calls a run records, such as a user simulator or a judge: one forwarding
replica for each."""

from __future__ import annotations

import contextlib
from typing import Any

from raylight.agent.resources import LLM, NamedResources, ProxyLLM
from raylight.config import EngineConfig
from raylight.serving.deploy.deployment import Deployment
from raylight.serving.deploy.replica import ReplicaSettings
from raylight.store.client import StoreClient
from raylight.weights.actor import running_coordinator


def is_traced_upstream(resource: Any) -> bool:
    """Return True for an upstream model whose calls are recorded: `LLM(endpoint=..., traced=True)`."""
    return (
        isinstance(resource, LLM)
        and not isinstance(resource, ProxyLLM)
        and resource.traced
        and bool(resource.endpoint)
    )


async def serve_traced_upstreams(
    resources: NamedResources,
    run_name: str,
    secret: str,
    store: StoreClient,
    owns_cluster: bool,
    stack: contextlib.AsyncExitStack,
) -> NamedResources:
    """Start a recording replica in front of each traced upstream model; return the resources with the
    replicas' addresses.

    Args:
        stack: receives the callbacks that stop the replicas.
    """
    upstreams = {name: value for name, value in resources.items() if is_traced_upstream(value)}
    served = {}
    for name, llm in upstreams.items():  # one at a time, as the first may have to start Serve
        served[name] = await _serve(run_name, name, llm, secret, store, owns_cluster, stack)
    return resources | served


async def _serve(
    run_name: str,
    name: str,
    llm: LLM,
    secret: str,
    store: StoreClient,
    owns_cluster: bool,
    stack: contextlib.AsyncExitStack,
) -> LLM:
    app_name = f"{run_name}-{name}"
    config = EngineConfig.parse({}, kind="upstream", url=llm.endpoint, api_key=llm.api_key, num_cpus=0)
    coordinator = await stack.enter_async_context(
        running_coordinator(app_name, store, replacement_timeout_s=config.start_timeout_s)
    )
    spec = ReplicaSettings(
        app_name=app_name,
        run=run_name,
        model_path="",
        model=llm.model,
        config=config,
        secret=secret,
        seed=0,
        store=store,
        coordinator=coordinator.handle,
    )
    deployment = Deployment(spec, owns_cluster)
    stack.push_async_callback(deployment.stop)
    url = await deployment.start()
    return llm.model_copy(update={"endpoint": url, "api_key": None})
