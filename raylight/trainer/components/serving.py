"""`Serving`: starts the engines and the gateway that agents call, and watches them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine

import ray

from raylight.agent.resources import LLM, NamedResources, ProxyLLM
from raylight.config import EngineConfig
from raylight.runner.scaling import Resizable
from raylight.serving.deploy.deployment import Deployment
from raylight.serving.deploy.monitor import CountReplicas, IngressProbe, ServingMonitor
from raylight.serving.deploy.replica import ReplicaSettings
from raylight.store.client import StoreClient
from raylight.trainer.spec.run_resources import with_policy
from raylight.trainer.spec.settings import ServingSettings
from raylight.weights.actor import running_coordinator
from raylight.weights.client import CoordinatorClient
from raylight.weights.peft_files import read_adapter


class Serving:
    """The model of a run with its coordinator, and a recording replica for each traced upstream model.

    Args:
        app_name: name of the Serve application, and of the namespace of the coordinator.
        model: None for a run that serves no model.
        secret: secret from which the API keys of attempts are derived; None: anyone may use the model.
        store: records the calls; None records none.
        show_stage: shows what the run is doing now.
        owns_cluster: True if the Ray cluster ends with this run.
    """

    coordinator: CoordinatorClient
    """The coordinator, or what stands in its place for a local learner."""
    deployment: Deployment
    """Deployment of the run's model, if it has one, once it is prepared."""
    resources: NamedResources
    """Resources of the run, with the addresses of the models that it serves."""
    _llm: LLM
    """The run's model, once it is up."""

    def __init__(
        self,
        app_name: str,
        model: ServingSettings | None,
        secret: str | None,
        store: StoreClient | None,
        show_stage: Callable[[str], None],
        owns_cluster: bool,
    ) -> None:
        self.model = model
        self._app_name, self._secret, self._store = app_name, secret, store
        self._show_stage, self._owns_cluster = show_stage, owns_cluster
        self.monitors: list[ServingMonitor] = []
        """A monitor of each served model."""

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the coordinator of the run's model, if it has one."""
        self._stack = stack
        if self.model is None:
            return
        engine = self.model.engine
        running = running_coordinator(
            self._app_name,
            self._store,
            replacement_timeout_s=engine.start_timeout_s,
            min_replicas=engine.min_replicas,
            report=self._show_stage,
        )
        self.coordinator = await stack.enter_async_context(running)

    def prepare(self, seed: int, rollouts: int = 0) -> None:
        """Define the deployment of the run's model, if it has one, and register its end.

        Args:
            seed: of the sampling.
            rollouts: most rollouts that call the model at a time.
        """
        if (model := self.model) is None:
            return
        settings = ReplicaSettings(
            app_name=self._app_name,
            route=model.route,
            model_path=model.model_path,
            model=model.name,
            config=model.engine,
            secret=self._secret,
            seed=seed,
            store=self._store,
            coordinator=self.coordinator.handle,
            training_temperature=model.training_temperature,
            sessions=model.session_rules,
        )
        self.deployment = Deployment(
            settings, self._owns_cluster, rollouts, self.coordinator, self._show_stage
        )
        self._stack.push_async_callback(self.deployment.stop)

    async def start(self) -> str:
        """Start the replicas of the run's model, and serve its adapter; return the model's base URL.

        Raises:
            PortInUseError: the requested port is taken.
            EngineStartError: the replicas did not start in time.
            WeightSyncError: the adapter did not reach them.
        """
        assert self.model is not None, "the run serves a model"
        url, name = await self.deployment.start(), self.model.name
        for place, (name, folder) in enumerate(self.model.lora_adapters.items()):
            payload_refs, timeout = [ray.put(read_adapter(folder))], self.model.lora_adapter_timeout_s
            await self.coordinator.publish(place + 1, payload_refs, timeout, adapter=name)
        self._llm = LLM(
            endpoint=url, model=name, traced=True, sampling_parameters=self.model.sampling_parameters
        )
        return url

    async def offer(self, resources: NamedResources) -> None:
        """Serve the traced upstream models among the run's resources, have `watches` probe all served models,
        and store the resources with their addresses, for agents to use."""
        assert self._store is not None, "a run with resources has a store"
        self.resources, stack = resources, self._stack
        if any(map(is_traced_upstream, resources.values())):  # after the deployment: two must not start Serve
            self.resources = await serve_traced_upstreams(
                resources, self._app_name, self._secret or "", self._store, self._owns_cluster, stack
            )
        for name, resource in self.resources.items():
            if resource is not resources[name]:
                self._monitor(f"{self._app_name}-{name}", resource.endpoint, EngineConfig())
        if self.model is not None:
            self._monitor_model(self._llm.endpoint, self.model.engine)
            self.resources = fill_resources(self.resources, self._llm, self.model)
            self._show_stage(f"the model is served at {self._llm.endpoint}")
            if self.model.session_rules is not None:
                self._show_stage(f"sessions are opened at {self._llm.endpoint}/v1/sessions with the API key")
        if self.resources:
            await self._store.add_resources(self.resources)

    def _monitor_model(self, url: str, engine: EngineConfig) -> None:
        """Have `watches` probe the run's model."""
        replicas = self.coordinator
        self._monitor(self._app_name, url, engine, lambda: replicas.live_replicas)

    def _monitor(
        self, app_name: str, url: str, config: EngineConfig, count_replicas: CountReplicas = lambda: None
    ) -> None:
        assert self._store is not None
        probe = IngressProbe(url, count_replicas)
        monitor = ServingMonitor(app_name, probe, self._store, config.start_timeout_s, self._show_stage)
        self._stack.push_async_callback(monitor.aclose)
        self.monitors.append(monitor)

    def watches(self) -> list[Coroutine[object, object, object]]:
        """Return a coroutine for each served model, which fails if the model stays away."""
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
        """Parts that `raylight scale` can resize, by name."""
        return {} if self.model is None else {"replicas": self.deployment}

    def metrics(self) -> dict[str, float]:
        """Return the number of live replicas, and the number and the total length of outages so far."""
        replicas = {f"serving/{name}": float(part.size) for name, part in self.resizable.items()}
        return replicas | {
            "serving/outages": float(self.outages),
            "serving/away_s": sum(monitor.seconds_away for monitor in self.monitors),
        }

    async def counts(self) -> dict[str, int]:
        """Return the numbers of evicted replicas and of restarts of the coordinator."""
        if self.model is None:
            return {}
        replicas = self.coordinator
        return {"replicas_evicted": replicas.evictions, "coordinator_restarts": replicas.restarts}


def fill_resources(resources: NamedResources, llm: LLM, model: ServingSettings) -> NamedResources:
    """Return resources with the served model `llm` among them, see `with_policy`."""
    overrides = model.sampling_overrides
    filled = with_policy(resources, llm, model.models)
    for name, resource in filled.items():
        if overrides and isinstance(resource, LLM) and resource.endpoint == llm.endpoint:
            parameters = resource.sampling_parameters | overrides
            filled[name] = resource.model_copy(update={"sampling_parameters": parameters})
    return filled


def is_traced_upstream(resource: object) -> bool:
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
