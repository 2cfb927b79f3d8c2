"""`ServedModel`: starts the coordinator and the engines of a model that agents or the run itself call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

import ray

from raylight.agent.resources import LLM
from raylight.config import LearnerConfig
from raylight.runner.scaling import Resizable
from raylight.serving.deploy.deployment import Deployment
from raylight.serving.deploy.replica import ReplicaSettings
from raylight.store.client import StoreClient
from raylight.trainer.components import Component
from raylight.trainer.spec.settings import ServingSettings
from raylight.weights.actor import running_coordinator
from raylight.weights.client import CoordinatorClient
from raylight.weights.peft_files import read_adapter


@dataclass(frozen=True)
class ServingContext:
    """The run, or the command, that models are served for.

    Attributes:
        name: its name.
        secret: secret from which the API keys of attempts are derived; None: anyone may use the models.
        show_stage: shows what the run is doing now.
        owns_cluster: True if the Ray cluster ends with this run.
    """

    name: str
    secret: str | None
    show_stage: Callable[[str], None]
    owns_cluster: bool


class ServedModel(Component):
    """A served model with its coordinator.

    Args:
        context: its name is that of the Serve application, and of the namespace of the coordinator.
        settings: the model, its engine and its adapters.
        store: records the calls; None records none.
        run: name of the run in metrics; None: the context's name.
        learner: settings of the learners that send weights to its replicas; None if none do.
    """

    coordinator: CoordinatorClient
    """The coordinator, or what stands in its place for a local learner."""
    deployment: Deployment
    """The replicas, once they are prepared."""
    llm: LLM
    """The model as agents call it, once it is up."""
    is_probed = True
    """True if a monitor is to probe the address."""

    def __init__(
        self,
        context: ServingContext,
        settings: ServingSettings,
        store: StoreClient | None = None,
        run: str | None = None,
        learner: LearnerConfig | None = None,
    ) -> None:
        self.settings, self._context, self._store, self._run = settings, context, store, run
        self._learner = learner

    async def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the coordinator."""
        self._stack, engine = stack, self.settings.engine
        running = running_coordinator(
            self._context.name,
            self._store,
            replacement_timeout_s=engine.start_timeout_s,
            min_replicas=engine.min_replicas,
            report=self._context.show_stage,
        )
        self.coordinator = await stack.enter_async_context(running)

    def prepare(self, seed: int, rollouts: int = 0) -> None:
        """Define the deployment, and register its end.

        Args:
            seed: of the sampling.
            rollouts: most rollouts that call the model at a time.
        """
        model, context = self.settings, self._context
        settings = ReplicaSettings(
            app_name=context.name,
            run=self._run,
            route=model.route,
            model_path=model.model_path,
            model=model.name,
            config=model.engine,
            secret=context.secret,
            seed=seed,
            store=self._store,
            coordinator=self.coordinator.handle,
            training_temperature=model.training_temperature,
            sessions=model.session_rules,
        )
        self.deployment = Deployment(
            settings, context.owns_cluster, rollouts, self.coordinator, context.show_stage, self._learner
        )
        self._stack.push_async_callback(self.deployment.stop)

    async def start(self) -> str:
        """Start the replicas, and serve the adapters; return the model's base URL.

        Raises:
            PortInUseError: the requested port is taken.
            EngineStartError: the replicas did not start in time.
            WeightSyncError: the adapter did not reach them.
        """
        url, name, model = await self.deployment.start(), self.settings.name, self.settings
        for place, (name, folder) in enumerate(model.lora_adapters.items()):
            payload_refs, timeout = [ray.put(read_adapter(folder))], model.lora_adapter_timeout_s
            await self.coordinator.publish(place + 1, payload_refs, timeout, adapter=name)
        self._set_llm(url, name)
        return url

    def _set_llm(self, url: str, name: str) -> None:
        self.llm = LLM(
            endpoint=url, model=name, traced=True, sampling_parameters=self.settings.sampling_parameters
        )

    def count_replicas(self) -> int | None:
        """Return the number of live replicas; None if it is not known."""
        return self.coordinator.live_replicas

    @property
    def resizable(self) -> dict[str, Resizable]:
        """Parts that `raylight scale` can resize, by name."""
        return {"replicas": self.deployment}

    async def counts(self) -> dict[str, int]:
        """Return the numbers of evicted replicas and of restarts of the coordinator."""
        replicas = self.coordinator
        return {"replicas_evicted": replicas.evictions, "coordinator_restarts": replicas.restarts}
