"""The components that every run has, a store and runners: started together, watched, and stopped in order, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from raylight.agent.resources import NamedResources
from raylight.errors import ConfigError, summarize_ray_error
from raylight.runner.external_runners import ExternalRunners
from raylight.runner.pool import RunnerPool
from raylight.store.actor import start_store
from raylight.store.client import StoreClient
from raylight.store.journal import Journal
from raylight.trainer.plan import RunPlan
from raylight.trainer.upstreams import is_traced_upstream, serve_upstreams

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_TIMEOUT_S = 10.0


async def _close_store(actor: Any) -> None:
    """Let the store put its file in order and let go of it, so that whoever comes next can have it."""
    try:
        await asyncio.wait_for(actor.close.remote(), CLOSE_TIMEOUT_S)
    except (TimeoutError, RayActorError, RayTaskError) as error:
        logger.warning("the store did not close: %s", summarize_ray_error(error))
    finally:
        ray.kill(actor)


class Session:
    """The running components of one run. Use `async with`; leaving it stops everything that was started."""

    store: StoreClient
    pool: RunnerPool | ExternalRunners
    resources: NamedResources
    """Those of the plan, with the addresses of what is served here."""

    def __init__(self, plan: RunPlan, say: Callable[[str], None], cluster_ends: bool) -> None:
        self.run = plan
        self._say = say
        self._cluster_ends = cluster_ends
        self._continues = False
        """The store in the run directory is of the run that goes on here."""
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._stack.aclose()  # goes on with the others when one fails
        except Exception:  # what the run itself raised or returned matters more
            logger.exception("cleaning up after %s failed in part", self.run.name)

    async def _start(self) -> None:
        self._say("starting the store and the runners")
        self._start_store()
        await self._serve_upstreams()
        if self.resources:
            await self.store.add_resources(self.resources)
        await self._make_pool().start()
        self._say(
            "runners joined"
            if self.run.runner.external
            else f"{self.run.runner.n} runner(s) wait for rollouts"
        )

    def _start_store(self) -> None:
        """The run's own store, which ends with it, or the one that was given."""
        plan = self.run
        if isinstance(plan.store, StoreClient):
            self.store = plan.store
            return
        if self._continues:
            self._say("the store goes on where it was")
        elif plan.store.path is None:
            Journal.discard(
                Path(plan.store_path)
            )  # of an earlier run in this folder, which begins anew as a whole
        elif os.path.exists(plan.store_path):
            raise ConfigError(
                f"there is a file at the store's path {plan.store_path} already; give the store another path, or remove it"
            )
        os.makedirs(os.path.dirname(plan.store_path), exist_ok=True)
        actor = start_store(plan.name, plan.store_path, plan.store)
        self._stack.push_async_callback(_close_store, actor)
        self.store = StoreClient(actor)

    async def _serve_upstreams(self) -> None:
        self.resources = self.run.resources
        if any(map(is_traced_upstream, self.resources.values())):
            self.resources = await serve_upstreams(
                self.resources,
                self.run.name,
                self.run.payload.secret,
                self.store,
                self._cluster_ends,
                self._stack,
            )

    def _make_pool(self) -> RunnerPool | ExternalRunners:
        external = self.run.runner.external
        if external:
            self._say(f"waiting for runners; start them with `raylight runner AGENT --run {self.run.name}`")
        self.pool = (ExternalRunners if external else RunnerPool)(
            self.run.name, self.run.runner, self.store, self.run.payload
        )
        self._stack.push_async_callback(self.pool.stop)
        return self.pool

    async def watched(self, work: Awaitable[T]) -> T:
        """Do the run's work; if the runners fail for good meanwhile, raise that instead of waiting forever."""
        working: asyncio.Task[Any] = asyncio.ensure_future(work)
        watching = asyncio.create_task(self.pool.watch())
        try:
            await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await watching
            return await working
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def counts(self) -> dict[str, int]:
        """What was counted along the way, by the store and by the pool."""
        pool = {"runners_lost": self.pool.lost, "runners_replaced": self.pool.replaced}
        return {**await self.store.statistics(), **pool}
