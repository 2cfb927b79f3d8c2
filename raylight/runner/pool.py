"""Pool of RunnerActors, watched from the driver.

A runner that dies or hangs is replaced, and its rollouts go back to the queue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pickle import PickleError
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raylight.agent.hooks import Hook, HookDispatcher
from raylight.agent.litagent import LitAgent
from raylight.agent.rollout_scope import TrainerView
from raylight.aio import pause
from raylight.config import RunnerConfig
from raylight.errors import (
    ConfigError,
    DiskError,
    PlacementError,
    RaylightError,
    RunnerLostError,
    summarize_ray_error,
)
from raylight.runner.runner import Runner, RunnerExit
from raylight.runner.start_up import StartUp
from raylight.store.client import StoreClient
from raylight.traces.tracer import OtelTracer, Tracer
from raylight.types import Failure

logger = logging.getLogger(__name__)

RELEASE_TIMEOUT_S = 5.0
PROBE_INTERVAL_S = 10.0
"""Longest interval between two probes of a runner's event loop."""
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


class RunnerActor:
    """A Runner as a Ray actor."""

    def __init__(self, name: str, store: StoreClient, pickled: bytes, config: RunnerConfig) -> None:
        payload: RunnerPayload = ray.cloudpickle.loads(pickled)
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

    async def ready(self) -> None:
        """Return once the actor is up; a later call returns while its event loop is responsive."""

    async def serve(self) -> RunnerExit:
        """Execute rollouts; see `Runner.serve`."""
        return await self._runner.serve()


class RunnerPool:
    """Starts and watches the runners of a run.

    Args:
        store: client of the run's store.
        payload: what every runner executes.
    """

    def __init__(
        self, namespace: str, config: RunnerConfig, store: StoreClient, payload: RunnerPayload
    ) -> None:
        self._namespace = namespace
        self._config = config
        self._store = store
        self._payload = _pickle(payload)
        self._actors: dict[str, Any] = {}
        self._started = 0
        self.lost = 0
        """Number of runners that died or hung."""
        self.replaced = 0
        """Number of runners that were replaced because too many agents hung in them."""
        self._lost_in_a_row = self._succeeded = 0

    async def start(self) -> None:
        """Start all runners and wait until they are up.

        Raises:
            PlacementError: the cluster has too few free resources.
            RunnerLostError: a runner failed while it started, or did not start in time.
        """
        for _ in range(self._config.n):
            self._start_actor()
        await StartUp(self._actors, self._config).wait()

    async def watch(self) -> None:
        """Keep the runners running until cancelled.

        Raises:
            RunnerLostError: more than `max_restarts` runners died in a row, without a rollout that succeeded
                meanwhile.
        """
        serving = {asyncio.ensure_future(actor.serve.remote()): name for name, actor in self._actors.items()}
        probing = asyncio.create_task(self._probe_forever())
        try:
            while serving:
                done, _ = await asyncio.wait(serving, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    name = await self._handle_exit(serving.pop(task), task)
                    if name is not None:
                        serving[asyncio.ensure_future(self._actors[name].serve.remote())] = name
            await self._reject_forever()
        finally:
            probing.cancel()
            for task in serving:
                task.cancel()

    async def stop(self) -> None:
        """Kill the runners, after releasing them in the store, so that none of their polls takes a rollout of
        a later run."""
        actors, self._actors = self._actors, {}
        released = (self._store.release_worker(self._worker_id(name), "the run ended") for name in actors)
        try:
            await asyncio.wait_for(asyncio.gather(*released, return_exceptions=True), RELEASE_TIMEOUT_S)
        except TimeoutError:
            logger.warning(
                "the store did not respond within %g s; the runners' leases will expire", RELEASE_TIMEOUT_S
            )
        finally:
            for actor in actors.values():
                ray.kill(actor)

    def _worker_id(self, name: str) -> str:
        """Id of a runner in the store, which several runs may share."""
        return f"{self._namespace}/{name}"

    def _start_actor(self) -> str:
        """Start another runner and return its name."""
        name = f"runner-{self._started}"
        self._started += 1
        config = self._config
        actor = (
            ray.remote(RunnerActor)
            .options(
                name=name,
                namespace=self._namespace,
                num_cpus=config.num_cpus,
                resources=config.resources,
                scheduling_strategy="SPREAD",
            )
            .remote(self._worker_id(name), self._store, self._payload, config)
        )
        self._actors[name] = actor
        return name

    async def _handle_exit(self, name: str, task: asyncio.Future[RunnerExit]) -> str | None:
        """Replace a runner that ended; returns the name of its replacement, or None if none is needed."""
        error = task.exception()
        actor = self._actors.pop(name)
        if isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
            if isinstance(error.cause, DiskError):  # of the store, which no other runner could write either
                raise error.cause from None
            raise RunnerLostError(f"{name} failed: {error.cause!r}") from error
        ray.kill(actor)
        if error is None and task.result() == "max_rollouts":
            return None
        if error is None:
            self.replaced += 1
            reason = "too many of its agents neither returned nor ended when cancelled"
        else:
            self.lost += 1
            reason = summarize_ray_error(error)
            succeeded = (await self._store.statistics()).get("rollouts_succeeded", 0)
            self._lost_in_a_row = 1 if succeeded > self._succeeded else self._lost_in_a_row + 1
            self._succeeded = succeeded
        requeued = await self._store.release_worker(self._worker_id(name), reason)
        if self._lost_in_a_row > self._config.max_restarts:
            raise RunnerLostError(
                f"{self._lost_in_a_row} runners died and no rollout succeeded meanwhile; the last error: "
                f"{reason}. See its log with `ray logs actor`, or raise RunnerConfig.max_restarts"
            )
        logger.warning(
            "%s ended (%s); %d rollouts go back to the queue and another runner starts",
            name,
            reason,
            requeued,
        )
        return await self._replace(name, reason)

    async def _replace(self, name: str, reason: str) -> str:
        """Start a runner in the place of one that ended; returns its name.

        A replacement that dies counts as a lost runner too: Ray may place it on a node that is being lost.

        Raises:
            RunnerLostError: the replacement cannot be placed or cannot load the agent, or too many died.
        """
        while True:
            replacement = self._start_actor()
            try:
                await StartUp({replacement: self._actors[replacement]}, self._config).wait()
                return replacement
            except (PlacementError, RunnerLostError) as error:
                if not _died(error) or self._lost_in_a_row >= self._config.max_restarts:
                    raise RunnerLostError(
                        f"{name} ended ({reason}) and could not be replaced: {error}"
                    ) from None
                self.lost += 1
                self._lost_in_a_row += 1
                ray.kill(self._actors.pop(replacement))
                logger.warning("the replacement of %s died (%s); another runner starts", name, error)

    async def _probe_forever(self) -> None:
        """Kill runners whose event loop is blocked, by an asynchronous agent for example; `watch` replaces
        them."""
        while True:
            await pause(min(PROBE_INTERVAL_S, self._config.stuck_after_s))
            probes = {asyncio.ensure_future(actor.ready.remote()): actor for actor in self._actors.values()}
            if not probes:
                continue
            responsive, stuck = await asyncio.wait(probes, timeout=self._config.stuck_after_s)
            for task in responsive:
                task.exception()  # `watch` handles runners that died
            for task in stuck:
                logger.warning("a runner did not respond for %g s and is killed", self._config.stuck_after_s)
                ray.kill(probes[task])

    async def _reject_forever(self) -> None:
        """Fail all further rollouts, because every runner has executed its `max_rollouts`; they would wait
        forever otherwise."""
        reason = f"all {self._config.n} runners have executed max_rollouts={self._config.max_rollouts}"
        failure = Failure(
            kind="cancelled", error=f"RunnersEnded: {reason}; raise it, or enqueue fewer rollouts"
        )
        while True:
            for rollout in await self._store.dequeue_many_rollouts(limit=100, timeout=30.0):
                await self._store.finish_attempt(rollout, "failed", failure)


def _died(error: RaylightError) -> bool:
    """Return True if a runner's process ended while it started, by no error of the agent."""
    cause = error.__cause__
    return isinstance(cause, RayActorError) and not cause.actor_init_failed


def _pickle(payload: RunnerPayload) -> Any:
    """Return the pickled payload; a large one as a reference to Ray's object store.

    Ray ends a driver that holds objects of a node which leaves the cluster, if it is the driver's own node:
    at once, and without an exception.

    Raises:
        ConfigError: the payload cannot be pickled.
    """
    try:
        pickled = ray.cloudpickle.dumps(payload)
    except (PickleError, TypeError, AttributeError) as error:
        raise ConfigError(
            "the agent (or its tracer, or a hook) cannot be sent to the runners: "
            f"{str(error).splitlines()[0]}. Create clients, locks and caches inside the rollout function, or "
            "define them in an importable module"
        ) from None
    return pickled if len(pickled) <= MAX_INLINE_BYTES else ray.put(pickled)
