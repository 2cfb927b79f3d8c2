"""The components that every run has, a store and runners: started together, watched, and stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from raylight.agent.resources import NamedResources
from raylight.aio import cancel_all
from raylight.config import EngineConfig
from raylight.errors import ConfigError, summarize_ray_error
from raylight.runner.external_runners import ExternalRunners
from raylight.runner.pool import RunnerPool
from raylight.serving.deploy.monitor import CountReplicas, IngressProbe, ServingMonitor
from raylight.store.actor import start_store
from raylight.store.client import StoreClient
from raylight.store.journal import Journal
from raylight.store.watch import StoreWatch
from raylight.trainer.cluster_monitor import is_cluster_lost
from raylight.trainer.plan import RunPlan
from raylight.trainer.traced_upstreams import is_traced_upstream, serve_traced_upstreams

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0


async def _close_store(actor: Any) -> None:
    """Close the store's file, so that the next process can open it, and kill the actor."""
    try:
        await asyncio.wait_for(actor.close.remote(), CLOSE_TIMEOUT_S)
    except (TimeoutError, RayActorError, RayTaskError) as error:
        logger.warning("the store actor did not close its file: %s", summarize_ray_error(error))
    finally:
        ray.kill(actor)


class Session:
    """The running components of one run. Use `async with`: the exit stops everything that was started.

    Args:
        show_stage: shows what the run is doing now.
        owns_cluster: True if the Ray cluster ends with this run.
    """

    store: StoreClient
    pool: RunnerPool | ExternalRunners
    resources: NamedResources
    """Resources of the plan, with the addresses of the models that the run serves."""

    def __init__(self, plan: RunPlan, show_stage: Callable[[str], None], owns_cluster: bool) -> None:
        self.plan = plan
        self._show_stage = show_stage
        self._owns_cluster = owns_cluster
        self._reopens_store = False
        """True if the store in the run directory belongs to the run that is resumed."""
        self._store_watch: StoreWatch | None = None
        self._monitors: list[ServingMonitor] = []
        """A monitor of each model that the run serves."""
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        if is_cluster_lost():
            self._stack.pop_all()
            return
        try:
            await self._stack.aclose()  # continues with the remaining callbacks when one fails
        except Exception:  # the run's own result or error is more important
            logger.exception("some components of %s could not be stopped", self.plan.name)

    async def _start(self) -> None:
        self._show_stage("starting the store and the runners")
        self._start_store()
        await self._serve_traced_upstreams()
        if self.resources:
            await self.store.add_resources(self.resources)
        await self._make_pool().start()
        external = self.plan.runner.external
        self._show_stage("runners joined" if external else f"{self.plan.runner.n} runner(s) ready")

    def _start_store(self) -> None:
        """Start the run's own store, or use the one that the user passed in.

        Raises:
            ConfigError: the store's path belongs to an existing file.
        """
        plan = self.plan
        if isinstance(plan.store, StoreClient):
            self.store = plan.store
            return
        if self._reopens_store:
            self._show_stage("reopening the store")
        elif plan.store.path is None:
            Journal.discard(Path(plan.store_path))  # left by an earlier run in this directory
        elif os.path.exists(plan.store_path):
            raise ConfigError(
                f"store.path {plan.store_path} already exists; choose another path, or remove the file"
            )
        os.makedirs(os.path.dirname(plan.store_path), exist_ok=True)
        actor = start_store(plan.name, plan.store_path, plan.store)
        self._stack.push_async_callback(_close_store, actor)
        self.store = StoreClient(actor)
        restart = functools.partial(ray.kill, actor, no_restart=False)
        self._store_watch = StoreWatch(self.store.lease_seconds, restart, logger.warning)

    async def _serve_traced_upstreams(self) -> None:
        self.resources = self.plan.resources
        if any(map(is_traced_upstream, self.resources.values())):
            self.resources = await serve_traced_upstreams(
                self.resources,
                self.plan.name,
                self.plan.payload.secret,
                self.store,
                self._owns_cluster,
                self._stack,
            )
        for name, resource in self.resources.items():
            if resource is not self.plan.resources[name]:
                self._monitor_serving(f"{self.plan.name}-{name}", resource.endpoint, EngineConfig())

    def _monitor_serving(
        self,
        app_name: str,
        url: str,
        config: EngineConfig,
        count_replicas: CountReplicas = lambda: None,
    ) -> None:
        """Have `watched` probe a served model."""
        probe = IngressProbe(url, count_replicas)
        monitor = ServingMonitor(app_name, probe, self.store, config.start_timeout_s, self._show_stage)
        self._stack.push_async_callback(monitor.aclose)
        self._monitors.append(monitor)

    def _make_pool(self) -> RunnerPool | ExternalRunners:
        external = self.plan.runner.external
        if external:
            command = f"raylight runner AGENT --run {self.plan.name}"
            self._show_stage(f"waiting for external runners; start them with `{command}`")
        self.pool = (ExternalRunners if external else RunnerPool)(
            self.plan.name, self.plan.runner, self.store, self.plan.payload
        )
        self._stack.push_async_callback(self.pool.stop)
        return self.pool

    async def watched(self, work: Awaitable[T]) -> T:
        """Await the run's work; if the runner pool fails meanwhile or a served model stays away, cancel the
        work and raise that error."""
        working: asyncio.Task[Any] = asyncio.ensure_future(work)
        watches = [self.pool.watch(), *(monitor.run() for monitor in self._monitors)]
        if self._store_watch is not None:
            watches.append(self._store_watch.run())
        watching = [asyncio.ensure_future(watch) for watch in watches]
        try:
            pending = {working, *watching}
            while not working.done():
                ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for watch in ended - {working}:
                    watch.result()
            return await working
        finally:
            await cancel_all([working, *watching])

    @property
    def outages(self) -> int:
        """Number of outages of served models so far."""
        return sum(monitor.outages for monitor in self._monitors)

    async def confirm_serving(self) -> int:
        """Wait until all served models are in reach; returns the number of outages so far.

        An outage returns rollouts to the queue that were decided while it was not yet known.
        """
        await asyncio.gather(*(monitor.confirm() for monitor in self._monitors))
        return self.outages

    def serving_metrics(self) -> dict[str, float]:
        """Return the number and the total length of outages so far."""
        return {
            "serving/outages": float(self.outages),
            "serving/away_s": sum(monitor.seconds_away for monitor in self._monitors),
        }

    async def counts(self) -> dict[str, int]:
        """Return the counters of the store that are not 0, and those of the runner pool."""
        pool = {"runners_lost": self.pool.lost, "runners_replaced": self.pool.replaced}
        statistics = await self.store.statistics()
        counts = {key: n for key, n in statistics.items() if n and key not in ("name", "uptime")}
        return counts | pool
