"""`Endpoints`: the addresses of a run's models for agents, and a monitor of each."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import TypeGuard

from raylight.agent.resources import LLM, NamedResources, ProxyLLM
from raylight.config import EngineConfig
from raylight.runner.scaling import Resizable
from raylight.serving.deploy.monitor import CountReplicas, IngressProbe, ServingMonitor
from raylight.store.client import StoreClient
from raylight.trainer.components import Component
from raylight.trainer.components.served_model import ServedModel, ServingContext
from raylight.trainer.spec.run_resources import with_policy
from raylight.trainer.spec.settings import ServingSettings
from raylight.types import ResourcesUpdate


class Endpoints(Component):
    """The models that agents call: the run's own, and a recording replica for each traced upstream model.

    Args:
        context: the run.
        models: the run's own model, if it serves one.
        store: stores the resources with their addresses, and the outages.
    """

    resources: NamedResources
    """Resources of the run, with the addresses of the models that it serves."""
    published: ResourcesUpdate
    """The same as the store has them, if there are some."""

    def __init__(self, context: ServingContext, models: Sequence[ServedModel], store: StoreClient) -> None:
        self._context, self._models, self._store = context, models, store
        self._show_stage = context.show_stage
        self.monitors: list[ServingMonitor] = []
        """A monitor of each model in a separate process."""

    async def offer(self, resources: NamedResources, stack: contextlib.AsyncExitStack) -> None:
        """Serve the traced upstream models among the run's resources, have `watches` probe all served models,
        and store the resources with their addresses, for agents to use."""
        self.resources = dict(resources)
        # after the deployment, one at a time: two must not start Serve
        for name, resource in resources.items():
            if is_traced_upstream(resource):
                app_name = f"{self._context.name}-{name}"
                self.resources[name] = served = await self._serve_upstream(app_name, resource, stack)
                self._monitor(app_name, served.endpoint, EngineConfig(), stack)
        for model in self._models:
            llm, settings = model.llm, model.settings
            if model.is_probed:
                self._monitor(self._context.name, llm.endpoint, settings.engine, stack, model.count_replicas)
            self.resources = fill_resources(self.resources, llm, settings)
            self._show_stage(f"the model is served at {llm.endpoint}")
            if settings.session_rules is not None:
                self._show_stage(f"sessions are opened at {llm.endpoint}/v1/sessions with the API key")
        if self.resources:
            self.published = await self._store.add_resources(self.resources)

    async def _serve_upstream(self, app_name: str, llm: LLM, stack: contextlib.AsyncExitStack) -> LLM:
        """Start a recording replica in front of an upstream model; return the model at its address."""
        config = EngineConfig.parse({}, kind="upstream", url=llm.endpoint, api_key=llm.api_key, num_cpus=0)
        context, settings = replace(self._context, name=app_name), ServingSettings("", config, llm.model)
        served = ServedModel(context, settings, self._store, run=self._context.name)
        await served.open(stack)
        served.prepare(0)
        return llm.model_copy(update={"endpoint": await served.start(), "api_key": None})

    def _monitor(
        self,
        app_name: str,
        url: str,
        config: EngineConfig,
        stack: contextlib.AsyncExitStack,
        count_replicas: CountReplicas = lambda: None,
    ) -> None:
        probe = IngressProbe(url, count_replicas)
        monitor = ServingMonitor(app_name, probe, self._store, config.start_timeout_s, self._show_stage)
        stack.push_async_callback(monitor.aclose)
        self.monitors.append(monitor)

    def watches(self) -> list[Coroutine[object, object, object]]:
        """Return a coroutine for each monitor, which fails if the model stays away."""
        return [monitor.run() for monitor in self.monitors]

    @property
    def outages(self) -> int:
        """Number of outages of served models so far."""
        return sum(monitor.outages for monitor in self.monitors)

    async def confirm(self) -> int:
        """Wait until all served models are in reach; returns the number of outages so far.

        An outage returns rollouts to the queue that were decided while it was not yet known.
        """
        await asyncio.gather(*(monitor.confirm() for monitor in self.monitors))
        return self.outages

    @property
    def resizable(self) -> dict[str, Resizable]:
        """Parts of the models that `raylight scale` can resize, by name."""
        return {name: part for model in self._models for name, part in model.resizable.items()}

    def metrics(self) -> dict[str, float]:
        """Return the number of live replicas, and the number and the total length of outages so far."""
        replicas = {f"serving/{name}": float(part.size) for name, part in self.resizable.items()}
        return replicas | {
            "serving/outages": float(self.outages),
            "serving/away_s": sum(monitor.seconds_away for monitor in self.monitors),
        }


def fill_resources(resources: NamedResources, llm: LLM, model: ServingSettings) -> NamedResources:
    """Return resources with the served model `llm` among them, see `with_policy`."""
    overrides = model.sampling_overrides
    filled = with_policy(resources, llm, model.models)
    for name, resource in filled.items():
        if overrides and isinstance(resource, LLM) and resource.endpoint == llm.endpoint:
            parameters = resource.sampling_parameters | overrides
            filled[name] = resource.model_copy(update={"sampling_parameters": parameters})
    return filled


def is_traced_upstream(resource: object) -> TypeGuard[LLM]:
    """Return True for an upstream model whose calls are recorded: `LLM(endpoint=..., traced=True)`."""
    return (
        isinstance(resource, LLM)
        and not isinstance(resource, ProxyLLM)
        and resource.traced
        and bool(resource.endpoint)
    )
