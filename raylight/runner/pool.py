"""Pool of RunnerActors, watched from the driver.

A runner that dies or hangs is replaced, and its rollouts go back to the queue. The number of runners can
change during a run, and runners leave a node that drains.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from raylight._utils.aio import pause, task_group
from raylight.config import RunnerConfig
from raylight.errors import (
    ConfigError,
    DiskError,
    PlacementError,
    RaylightError,
    RunnerLostError,
    summarize_ray_error,
)
from raylight.runner.actor import Departure, PooledRunner, RunnerActor, RunnerPayload
from raylight.runner.draining import grace_seconds, watch_draining_nodes
from raylight.runner.runner import RunnerExit
from raylight.runner.start_up import StartUp
from raylight.store.client import StoreClient
from raylight.types import Failure

logger = logging.getLogger(__name__)

RUNNER_PREFIX = "runner-"
"""Beginning of the names of a pool's actors."""
RELEASE_TIMEOUT_S = 5.0
EXIT_REASONS = {
    "retired": "the store has released it",
    "hung_agents": "too many of its agents neither returned nor ended when cancelled",
    "limited": "an agent has lowered a resource limit of its process for good, such as RLIMIT_AS",
}
PROBE_INTERVAL_S = 10.0
"""Longest interval between two probes of a runner's event loop."""


class RunnerPool:
    """Starts, watches and resizes the runners of a run.

    A runner that leaves, because of a resize or because its node drains, takes no more rollouts, and has
    `drain_timeout_s` to finish those that it executes. The others go back to the queue, and no rollout is
    charged for it.

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
        self._payload = payload.pickle()
        self._gateway_hosts = payload.gateway_hosts
        self._runners: dict[str, PooledRunner] = {}
        """Runners that start or work, by name."""
        self._leaving: set[PooledRunner] = set()
        self._started = 0
        self._tasks: asyncio.TaskGroup | None = None
        """Tasks of `watch`."""
        self._watched = asyncio.Event()
        self._exhausted = asyncio.Event()
        """Set when all runners have executed `max_rollouts`."""
        self.lost = 0
        """Number of runners that died or hung."""
        self.replaced = 0
        """Number of runners that were replaced because too many agents hung in them or their node drained."""
        self._lost_in_a_row = self._succeeded = 0

    @property
    def size(self) -> int:
        """Number of runners that are up, without those that are leaving."""
        return sum(runner.node is not None for runner in self._runners.values())

    async def start(self) -> None:
        """Start all runners and wait until they are up.

        Raises:
            PlacementError: the cluster has too few free resources.
            RunnerLostError: a runner failed while it started, or did not start in time.
        """
        await self._bring_up(self._start_missing())

    async def watch(self) -> None:
        """Keep the runners running until cancelled.

        Raises:
            RunnerLostError: more than `max_restarts` runners died in a row, without a rollout that succeeded
                meanwhile.
        """
        async with task_group() as self._tasks:
            for runner in self._runners.values():
                self._have_serve(runner)
            background = [
                self._tasks.create_task(work)
                for work in (self._probe_forever(), self._leave_draining_nodes())
            ]
            self._watched.set()
            await self._exhausted.wait()
            for task in background:
                task.cancel()
        await self._reject_forever()

    async def resize(self, n: int) -> None:
        """Change the number of runners while `watch` runs, and wait until it is reached.

        Of two calls at the same time the later one decides. The newest runners leave first. If some of the
        new ones cannot start, the pool keeps the others.

        Raises:
            ConfigError: `n` is no possible number, or the runners end by themselves (`max_rollouts`).
            PlacementError: the cluster has too few free resources.
            RunnerLostError: a new runner failed while it started, or did not start in time.
        """
        config = type(self._config)(**self._config.model_dump(exclude_unset=True) | {"n": n})
        if config.max_rollouts is not None:
            raise ConfigError(
                f"runners that end after runner.max_rollouts={config.max_rollouts} rollouts cannot be added "
                "or taken away during a run; leave max_rollouts out"
            )
        await self._watched.wait()
        self._config = config
        by_age = sorted(self._runners.values(), key=lambda runner: (runner.node is None, _number(runner)))
        departure = Departure(f"the run was scaled to {n} runners", config.drain_timeout_s)
        leaving = [self._dismiss(runner, departure) for runner in by_age[n:]]
        added = self._start_missing()
        try:
            await self._bring_up(added)
        except RaylightError:
            for runner in added:
                if runner.node is None and self._runners.get(runner.name) is runner:
                    del self._runners[runner.name]
                    ray.kill(runner.actor)
            self._config = self._config.model_copy(update={"n": max(len(self._runners), 1)})
            raise
        await asyncio.gather(*leaving)

    async def stop(self) -> None:
        """Kill the runners, after releasing them in the store, so that none of their polls takes a rollout of
        a later run."""
        runners = [*self._runners.values(), *self._leaving]
        self._runners, self._leaving = {}, set()
        released = (self._store.release_worker(runner.worker_id, "the run ended") for runner in runners)
        try:
            await asyncio.wait_for(asyncio.gather(*released, return_exceptions=True), RELEASE_TIMEOUT_S)
        except TimeoutError:
            logger.warning(
                "the store did not respond within %g s; the runners' leases will expire", RELEASE_TIMEOUT_S
            )
        finally:
            for runner in runners:
                ray.kill(runner.actor)

    def _start_missing(self) -> list[PooledRunner]:
        """Start as many runners as the pool lacks."""
        return [self._start_runner() for _ in range(self._config.n - len(self._runners))]

    def _start_runner(self) -> PooledRunner:
        name = f"{RUNNER_PREFIX}{self._started}"
        self._started += 1
        config, worker_id = self._config, f"{self._namespace}/{name}"
        actor = (
            ray.remote(RunnerActor)
            .options(
                name=name,
                namespace=self._namespace,
                num_cpus=config.num_cpus,
                resources=config.resources,
                scheduling_strategy="SPREAD",
            )
            .remote(worker_id, self._store, self._payload, config, self._gateway_hosts)
        )
        runner = self._runners[name] = PooledRunner(name, worker_id, actor)
        return runner

    async def _bring_up(self, runners: list[PooledRunner]) -> None:
        """Wait until new runners are up, without those that a resize takes away meanwhile."""
        while runners := [runner for runner in runners if runner.name in self._runners]:
            waiting = {runner.name: runner.actor for runner in runners if runner.node is None}
            try:
                await StartUp(waiting, self._config, on_up=self._begin).wait()
                return
            except RaylightError:
                if self._runners.keys() >= waiting.keys():
                    raise

    def _begin(self, name: str, node: str) -> None:
        """Have a runner that is up execute rollouts, at once or when the watch begins."""
        if runner := self._runners.get(name):
            runner.node = node
            if self._tasks is not None:
                self._have_serve(runner)

    def _have_serve(self, runner: PooledRunner) -> None:
        assert self._tasks is not None, "`watch` has begun"
        serving = asyncio.ensure_future(runner.actor.serve.remote())
        self._tasks.create_task(self._supervise(runner, serving))

    async def _supervise(self, runner: PooledRunner, serving: asyncio.Future[RunnerExit]) -> None:
        """Wait until a runner ends or is to leave, and act on it."""
        try:
            waits: list[asyncio.Future[Any]] = [serving, runner.departure]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if runner.departure.done():
                await self._see_off(runner, serving, runner.departure.result())
            else:
                await self._handle_exit(runner, serving)
        finally:
            serving.cancel()

    # planned departures

    def _dismiss(self, runner: PooledRunner, departure: Departure) -> asyncio.Future[None]:
        """Order a runner to leave; the result is set when it has left."""
        del self._runners[runner.name]
        if runner.node is None:  # it holds nothing
            ray.kill(runner.actor)
            runner.gone.set_result(None)
        else:
            self._leaving.add(runner)
            runner.departure.set_result(departure)
        return runner.gone

    async def _see_off(
        self, runner: PooledRunner, serving: asyncio.Future[RunnerExit], departure: Departure
    ) -> None:
        """Let a runner finish the rollouts that it executes, give back the others, and end it."""
        await self._store.retire_worker(runner.worker_id)
        await asyncio.wait([serving], timeout=departure.grace_s)
        died = serving.done() and serving.exception() is not None
        requeued = await self._store.release_worker(runner.worker_id, departure.reason, not died)
        self._leaving.discard(runner)
        ray.kill(runner.actor)
        logger.info(
            "%s has left (%s); %d of its rollouts go back to the queue",
            runner.name,
            departure.reason,
            requeued,
        )
        runner.gone.set_result(None)

    async def _leave_draining_nodes(self) -> None:
        """Have the runners of draining nodes leave, and start others in their place; Ray starts no actor on a
        draining node."""
        assert self._tasks is not None, "`watch` has begun"
        async for draining in watch_draining_nodes():
            for node, remaining_s in draining.items():
                affected = [runner for runner in self._runners.values() if runner.node == node]
                if not affected:
                    continue
                grace_s = grace_seconds(self._config.drain_timeout_s, remaining_s)
                logger.warning(
                    "node %s drains; its %d runner(s) leave within %.0f s and others start elsewhere",
                    node[:8],
                    len(affected),
                    grace_s,
                )
                for runner in affected:
                    self._dismiss(runner, Departure(f"node {node[:8]} drains", grace_s))
                    self._tasks.create_task(self._replace(runner.name, f"node {node[:8]} drains"))
                self.replaced += len(affected)

    # losses

    async def _handle_exit(self, runner: PooledRunner, serving: asyncio.Future[RunnerExit]) -> None:
        """Replace a runner that ended, unless it has executed all that it may."""
        error = serving.exception()
        del self._runners[runner.name]
        if isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
            if isinstance(error.cause, DiskError):  # of the store, which no other runner could write either
                raise error.cause from None
            raise RunnerLostError(f"{runner.name} failed: {error.cause!r}") from error
        ray.kill(runner.actor)
        if error is None and serving.result() == "max_rollouts":
            if not self._runners:
                self._exhausted.set()
            return
        if error is None:
            self.replaced += 1
            reason = EXIT_REASONS[serving.result()]
        else:
            self.lost += 1
            reason = summarize_ray_error(error)
            succeeded = (await self._store.statistics()).get("rollouts_succeeded", 0)
            self._lost_in_a_row = 1 if succeeded > self._succeeded else self._lost_in_a_row + 1
            self._succeeded = succeeded
        requeued = await self._store.release_worker(runner.worker_id, reason)
        if self._lost_in_a_row > self._config.max_restarts:
            raise RunnerLostError(
                f"{self._lost_in_a_row} runners died and no rollout succeeded meanwhile; the last error: "
                f"{reason}. See its log with `ray logs actor`, or raise RunnerConfig.max_restarts"
            )
        logger.warning(
            "%s ended (%s); %d rollouts go back to the queue and another runner starts",
            runner.name,
            reason,
            requeued,
        )
        await self._replace(runner.name, reason)

    async def _replace(self, name: str, reason: str) -> None:
        """Start a runner in the place of one that ended, if the pool still lacks one.

        A replacement that dies counts as a lost runner too: Ray may place it on a node that is being lost. A
        replacement without resources waits for them as long as other runners work.

        Raises:
            RunnerLostError: the replacement cannot be placed or cannot load the agent, or too many died.
        """
        while len(self._runners) < self._config.n:
            replacement = self._start_runner()
            try:
                await self._await_replacement(replacement)
                return
            except (PlacementError, RunnerLostError) as error:
                if not _died(error) or self._lost_in_a_row >= self._config.max_restarts:
                    raise RunnerLostError(
                        f"{name} ended ({reason}) and could not be replaced: {error}"
                    ) from None
                self.lost += 1
                self._lost_in_a_row += 1
                ray.kill(self._runners.pop(replacement.name).actor)
                logger.warning("the replacement of %s died (%s); another runner starts", name, error)

    async def _await_replacement(self, replacement: PooledRunner) -> None:
        while True:
            try:
                await self._bring_up([replacement])
                return
            except PlacementError as error:
                if not self.size:
                    raise
                logger.warning("the run goes on with %d runner(s) meanwhile: %s", self.size, error)

    async def _probe_forever(self) -> None:
        """Kill runners whose event loop is blocked, by an asynchronous agent for example; `watch` replaces
        them."""
        while True:
            await pause(min(PROBE_INTERVAL_S, self._config.stuck_after_s))
            probes = {
                asyncio.ensure_future(runner.actor.ready.remote()): runner.actor
                for runner in self._runners.values()
                if runner.node is not None  # `StartUp` watches the others
            }
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


def _number(runner: PooledRunner) -> int:
    """Position of a runner in the order of their starts."""
    return int(runner.name.rpartition("-")[2])


def _died(error: RaylightError) -> bool:
    """Return True if a runner's process ended while it started, by no error of the agent."""
    cause = error.__cause__
    return isinstance(cause, RayActorError) and not cause.actor_init_failed
