"""The pool of RunnerActors, watched from the driver: a runner that dies or hangs is replaced and what it had is given back."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pickle import PickleError
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raylight.agent.hooks import Hook, HookDispatcher
from raylight.agent.litagent import LitAgent
from raylight.config import RunnerConfig
from raylight.errors import ConfigError, PlacementError, RunnerLostError, summarize_ray_error
from raylight.runner.runner import Ending, Runner
from raylight.store.client import StoreClient
from raylight.traces.tracer import OtelTracer, Tracer
from raylight.types import Failure

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 5.0
PROBE_S = 10.0
"""How often, at least, each runner is asked whether its event loop still turns."""


@dataclass(frozen=True)
class RunnerPayload:
    """What travels to every runner."""

    agent: LitAgent
    tracer: Tracer = field(default_factory=OtelTracer)
    hooks: Sequence[Hook] = ()
    secret: str = ""


class RunnerActor:
    """A Runner as a Ray actor."""

    def __init__(self, name: str, store: StoreClient, payload: RunnerPayload, config: RunnerConfig) -> None:
        self._runner = Runner(
            name,
            store,
            payload.agent,
            payload.tracer,
            HookDispatcher(payload.hooks),
            payload.secret,
            config.max_concurrent,
            config.max_rollouts,
        )

    async def ready(self) -> None:
        """Answers once the actor is up, and as long as its event loop turns."""

    async def serve(self) -> Ending:
        return await self._runner.serve()


class RunnerPool:
    """Starts and watches the runners of a run.

    Args:
        store: client of the run's store.
        cargo: what every runner executes.
    """

    def __init__(
        self, namespace: str, config: RunnerConfig, store: StoreClient, payload: RunnerPayload
    ) -> None:
        self._namespace = namespace
        self._config = config
        self._store = store
        self._payload = _shipped(payload)
        self._actors: dict[str, Any] = {}
        self._started = 0
        self.lost = 0
        """Runners that died or hung."""
        self._lost_in_a_row = self._succeeded = 0
        self.worn_out = 0
        """Runners replaced because too many agents hung in them."""

    async def start(self) -> None:
        """Start all runners and wait until they are up.

        Raises:
            PlacementError: the cluster has no room for them, or they did not start within `start_timeout_s`.
        """
        config = self._config
        for _ in range(config.n):
            self._start()
        ready = [asyncio.ensure_future(actor.ready.remote()) for actor in self._actors.values()]
        up, late = await asyncio.wait(
            ready, timeout=config.start_timeout_s, return_when=asyncio.FIRST_EXCEPTION
        )
        broken = [error for task in up if (error := task.exception())]
        if broken:
            raise RunnerLostError(
                f"the runners did not start: {summarize_ray_error(broken[0])}. A module that the agent needs must be importable on every "
                "node: put it beside the script, in the job's working directory, or install it"
            )
        if late:
            raise PlacementError(
                f"{len(late)} of {config.n} runners of {config.num_cpus:g} CPU were not up within {config.start_timeout_s:g} s; "
                f"free now: {ray.available_resources().get('CPU', 0):g} CPU. Ask for fewer runners, or for less CPU each"
            )

    async def watch(self) -> None:
        """Run the runners for as long as the run lasts.

        Raises:
            RunnerLostError: more runners died than `max_restarts` allows.
        """
        serving = {asyncio.ensure_future(actor.serve.remote()): name for name, actor in self._actors.items()}
        probing = asyncio.create_task(self._probe_forever())
        try:
            while serving:
                done, _ = await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    name = await self._after(serving.pop(task), task)
                    if name is not None:
                        serving[asyncio.ensure_future(self._actors[name].serve.remote())] = name
            await self._refuse_forever()
        finally:
            probing.cancel()
            for task in serving:
                task.cancel()

    async def stop(self) -> None:
        """Kill the runners. The store hears of it first, so that none of their polls takes a rollout of a later run."""
        actors, self._actors = self._actors, {}
        released = (self._store.release_worker(self._worker(name), "the run ended") for name in actors)
        try:
            await asyncio.wait_for(asyncio.gather(*released, return_exceptions=True), RELEASE_TIMEOUT_S)
        except TimeoutError:
            logger.warning("the store did not answer within %g s; its leases will expire", RELEASE_TIMEOUT_S)
        finally:
            for actor in actors.values():
                ray.kill(actor)

    def _worker(self, name: str) -> str:
        """A runner's name in the store: runs may share one."""
        return f"{self._namespace}/{name}"

    def _start(self) -> str:
        name = f"runner-{self._started}"
        self._started += 1
        config = self._config
        actor = (
            ray.remote(RunnerActor)
            .options(
                name=name, namespace=self._namespace, num_cpus=config.num_cpus, scheduling_strategy="SPREAD"
            )
            .remote(self._worker(name), self._store, self._payload, config)
        )
        self._actors[name] = actor
        return name

    async def _after(self, name: str, ended: asyncio.Future[Ending]) -> str | None:
        """A runner ended; returns the name of the one that takes its place, if any does."""
        error = ended.exception()
        actor = self._actors.pop(name)
        if isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
            raise RunnerLostError(f"{name} failed: {error.cause!r}") from error
        ray.kill(actor)
        if error is None and ended.result() == "enough":
            return None
        if error is None:
            self.worn_out += 1
            why = "too many agents in it neither returned nor let themselves be cancelled"
        else:
            self.lost += 1
            why = summarize_ray_error(error)
            succeeded = (await self._store.statistics()).get("rollouts_succeeded", 0)
            self._lost_in_a_row = 1 if succeeded > self._succeeded else self._lost_in_a_row + 1
            self._succeeded = succeeded
        returned = await self._store.release_worker(self._worker(name), why)
        if self._lost_in_a_row > self._config.max_restarts:
            raise RunnerLostError(
                f"{self._lost_in_a_row} runners died and no rollout succeeded meanwhile; the last one said: {why}. See its log "
                "with `ray logs actor`, or raise RunnerConfig.max_restarts"
            )
        logger.warning(
            "%s ended (%s); %d rollouts go back to the queue and another runner starts", name, why, returned
        )
        return await self._replacement(name, why)

    async def _replacement(self, name: str, why: str) -> str:
        replacement = self._start()
        try:
            await asyncio.wait_for(self._actors[replacement].ready.remote(), self._config.start_timeout_s)
        except TimeoutError:
            raise RunnerLostError(
                f"{name} ended ({why}), and the cluster has no room for another runner in its place"
            ) from None
        return replacement

    async def _probe_forever(self) -> None:
        """Kill runners whose event loop is stuck (an asynchronous agent that blocks it); being dead, they are replaced."""
        never = asyncio.Event()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(never.wait(), min(PROBE_S, self._config.stuck_after_s))
            asked = {asyncio.ensure_future(actor.ready.remote()): actor for actor in self._actors.values()}
            if not asked:
                continue
            answered, silent = await asyncio.wait(asked, timeout=self._config.stuck_after_s)
            for task in answered:
                task.exception()  # of one that is dead, `watch` hears by itself
            for task in silent:
                logger.warning("a runner did not answer for %g s and is killed", self._config.stuck_after_s)
                ray.kill(asked[task])

    async def _refuse_forever(self) -> None:
        """All runners have run their `max_rollouts`: what is still asked for fails for that reason, instead of waiting for ever."""
        why = f"all {self._config.n} runners have run their max_rollouts={self._config.max_rollouts}"
        failure = Failure(kind="cancelled", error=f"RunnersEnded: {why}; raise it, or ask for fewer rollouts")
        while True:
            for rollout in await self._store.dequeue_many_rollouts(limit=100, timeout=30.0):
                await self._store.finish_attempt(rollout, "failed", failure)


def _shipped(payload: RunnerPayload) -> Any:
    """What travels to the runners, in the object store.

    Raises:
        ConfigError: it cannot be pickled.
    """
    try:
        return ray.put(payload)
    except (PickleError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"the agent (or its tracer, or a hook) cannot be sent to the runners: {str(error).splitlines()[0]}. Create clients, "
            "locks and caches inside the rollout function, or define them in an importable module"
        ) from None
