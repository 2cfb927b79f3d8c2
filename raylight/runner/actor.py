"""A runner of a pool: its Ray actor, the payload that the actor receives, and its order to leave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pickle import PickleError
from typing import Any, NamedTuple

import ray

from raylight._utils.garbage import collect_less_often, freeze_startup_objects
from raylight._utils.no_proxy import bypass_proxies
from raylight.agent.clients import close_clients
from raylight.agent.hooks import Hook, HookDispatcher
from raylight.agent.litagent import LitAgent, TrainerView
from raylight.components import CODE_FOLDERS, add_code_folders
from raylight.config import RunnerConfig
from raylight.errors import ConfigError
from raylight.ray_metrics.reporter import Measurement, MetricReporter
from raylight.runner.runner import Runner, RunnerExit
from raylight.store.client import StoreClient
from raylight.traces.tracer import OtelTracer, Tracer

MAX_INLINE_BYTES = 64 * 2**10
"""Size up to which a payload is an argument of the actors. Ray puts arguments above 100 KiB into its object
store, for each actor."""


@dataclass(frozen=True)
class RunnerPayload:
    """Agent, tracer, hooks and secret that every runner receives."""

    agent: LitAgent
    tracer: Tracer = field(default_factory=OtelTracer)
    hooks: Sequence[Hook] = ()
    secret: str = ""
    run: str = ""
    """Name of the run in metrics."""
    gateway_hosts: tuple[str, ...] = ()
    """Hosts of the run's models, which agents call without a proxy."""

    def pickle(self) -> object:
        """Return the pickled payload; a large one as a reference to Ray's object store.

        Ray ends a driver that holds objects of a node which leaves the cluster, if it is the driver's own
        node: at once, and without an exception.

        Raises:
            ConfigError: the payload cannot be pickled.
        """
        try:
            pickled = ray.cloudpickle.dumps((CODE_FOLDERS, ray.cloudpickle.dumps(self)))
        except (PickleError, TypeError, AttributeError) as error:
            raise ConfigError(
                "the agent (or its tracer, or a hook) cannot be sent to the runners: "
                f"{str(error).splitlines()[0]}. Create clients, locks and caches inside the rollout "
                "function, or define them in an importable module"
            ) from None
        return pickled if len(pickled) <= MAX_INLINE_BYTES else ray.put(pickled)

    @staticmethod
    def unpickle(pickled: bytes) -> RunnerPayload:
        """Return a payload; the folders of its agent's file become importable first."""
        folders, payload = ray.cloudpickle.loads(pickled)
        add_code_folders(folders)
        return ray.cloudpickle.loads(payload)


class RunnerActor:
    """A Runner as a Ray actor."""

    def __init__(
        self,
        name: str,
        store: StoreClient,
        pickled: bytes,
        config: RunnerConfig,
        gateway_hosts: tuple[str, ...] = (),
    ) -> None:
        bypass_proxies(gateway_hosts)  # before the agent is imported, which may create its clients then
        payload = RunnerPayload.unpickle(pickled)
        self._metrics = MetricReporter(self._measure, payload.run, runner=name)
        self._capacity = config.max_concurrent
        self._runner = Runner(
            name,
            store,
            payload.agent,
            payload.tracer,
            HookDispatcher(payload.hooks),
            payload.secret,
            config.max_concurrent,
            config.max_rollouts,
            trainer=TrainerView(payload.tracer, tuple(payload.hooks), config.n, config.max_rollouts),
        )

    async def ready(self) -> str:
        """Return the id of the node once the actor is up; a later call returns while its event loop is
        responsive."""
        return ray.get_runtime_context().get_node_id()

    async def store(self) -> StoreClient:
        """Return the client of the run's store, for those that know only the run's name."""
        return self._runner.get_store()

    async def serve(self) -> RunnerExit:
        """Execute rollouts; see `Runner.serve`."""
        freeze_startup_objects()
        collect_less_often()
        self._metrics.start()
        try:
            return await self._runner.serve()
        finally:
            self._metrics.stop()
            await close_clients()

    def _measure(self) -> list[Measurement]:
        return [
            Measurement("raylight_runner_rollouts", self._runner.running),
            Measurement("raylight_runner_capacity", self._capacity),
        ]


class Departure(NamedTuple):
    """Order to a runner to leave the pool."""

    reason: str
    grace_s: float
    """Seconds for which it may finish the rollouts that it executes."""


class PooledRunner:
    """A runner of the pool.

    Args:
        worker_id: its id in the store, which several runs may share.
    """

    def __init__(self, name: str, worker_id: str, actor: Any) -> None:
        self.name = name
        self.worker_id = worker_id
        self.actor = actor
        self.node: str | None = None
        """Id of its node; None until it is up."""
        loop = asyncio.get_running_loop()
        self.departure: asyncio.Future[Departure] = loop.create_future()
        """Set when the runner is to leave."""
        self.gone: asyncio.Future[None] = loop.create_future()
        """Set when the runner has left as ordered."""
