"""Pool of RunnerActors, watched from the driver.

A runner that dies or hangs is replaced, and its rollouts go back to the queue. The number of runners can
change during a run, and runners leave a node that drains.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import ray
import ray._private.state as ray_state
from ray.autoscaler.v2.sdk import get_cluster_status
from ray.exceptions import RayActorError, RayError, RayTaskError

from raylight._utils.aio import cancel_all, pause, task_group
from raylight._utils.machine import available_cpus
from raylight._utils.ray_resources import format_amounts
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
from raylight.store.client import StoreClient
from raylight.types import Failure

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartState:
    """Position of an actor on its way up."""

    phase: Literal["unplaced", "starting", "loading"]
    """"unplaced": it waits for resources. "starting": a node has reserved them and starts a process.
    "loading": the process imports the agent."""
    pid: int = 0
    actor_id: str = ""

    def __str__(self) -> str:
        if self.phase == "loading":
            return f"is importing the agent in process {self.pid} (`ray logs actor --id {self.actor_id}`)"
        return "waits for resources" if self.phase == "unplaced" else "waits for its process to start"


UNPLACED = StartState("unplaced")


class StartUp:
    """One start of runners, which waits until all are up.

    A runner without resources has `placement_timeout_s`. A runner that a node has accepted has
    `start_timeout_s`, counted from the last progress of any runner, so that a busy machine delays a run and
    does not end it.

    Args:
        actors: actor handles by name.
        read_states: returns the states of the actors with these names.
        on_up: called with the name of each runner that is up, and the id of its node.
    """

    def __init__(
        self,
        actors: Mapping[str, Any],
        config: RunnerConfig,
        read_states: Callable[[Mapping[str, Any], Mapping[str, float]], dict[str, StartState]] | None = None,
        on_up: Callable[[str, str], None] = lambda name, node: None,
    ) -> None:
        self._actors = dict(actors)
        self._config = config
        self._read_states = read_states or read_start_states
        self._on_up = on_up
        self._states = dict.fromkeys(self._actors, UNPLACED)
        self._warned = False
        self._bundle = {"CPU": config.num_cpus, **config.resources}

    async def wait(self) -> dict[str, RayActorError]:
        """Wait until every runner responds, or until one died.

        Returns:
            Errors of the runners whose process died, by no error of the agent, by name. Empty: all are up.

        Raises:
            PlacementError: the cluster has too few free resources for a runner.
            RunnerLostError: a runner failed while it started, or was placed and made no progress in time.
        """
        ready = {asyncio.ensure_future(actor.ready.remote()): name for name, actor in self._actors.items()}
        clock, late = asyncio.get_running_loop().time, set(ready)
        placement_end = clock() + self._config.placement_timeout_s
        give_up_at = clock() + self._config.start_timeout_s
        died: dict[str, RayActorError] = {}
        try:
            while late and not died:
                next_check = give_up_at if clock() >= placement_end else min(placement_end, give_up_at)
                done, late = await asyncio.wait(
                    late, timeout=max(next_check - clock(), 0.0), return_when=asyncio.FIRST_COMPLETED
                )
                failure: BaseException | None = None
                for task in done:
                    if (error := task.exception()) is None:
                        self._on_up(ready[task], task.result())
                    elif isinstance(error, RayActorError) and not error.actor_init_failed:
                        died[ready[task]] = error
                    else:
                        failure = error
                if failure is not None:
                    raise RunnerLostError(_failure_message(failure)) from failure
                if done or await self._check(
                    {ready[task] for task in late}, clock() >= placement_end, clock() >= give_up_at
                ):
                    give_up_at = clock() + self._config.start_timeout_s
            return died
        finally:
            await cancel_all(ready)

    async def _check(self, late: set[str], placement_over: bool, start_over: bool) -> bool:
        """Return True if a runner made progress since the last check; raise if its time is over."""
        actors = {name: self._actors[name] for name in sorted(late)}
        states = await asyncio.to_thread(self._read_states, actors, self._bundle)
        unplaced = [name for name, state in states.items() if state.phase == "unplaced"]
        if unplaced and placement_over:
            raise PlacementError(self._placement_message(len(unplaced)))
        progress = any(self._states[name] != state for name, state in states.items())
        placed = {name: state for name, state in states.items() if name not in unplaced}
        if placed and start_over and not progress:
            raise RunnerLostError(
                f"{len(placed)} of {len(self._actors)} runners made no progress for "
                f"{self._config.start_timeout_s:g} s (runner.start_timeout_s) while they started: "
                f"{_describe(placed)}. If the machine is only busy, raise runner={{'start_timeout_s': ...}}"
            )
        if placed and not self._warned:
            self._warned = True
            logger.warning(
                "%d of %d runners have resources but are not up yet: %s. They have %g s to make progress "
                "(runner.start_timeout_s)",
                len(placed),
                len(self._actors),
                _describe(placed),
                self._config.start_timeout_s,
            )
        self._states |= states
        return progress or not placed

    def _placement_message(self, unplaced: int) -> str:
        config, nodes = self._config, [node for node in ray.nodes() if node["Alive"]]
        total, free = map(format_amounts, (ray.cluster_resources(), ray.available_resources()))
        return (
            f"{unplaced} of {len(self._actors)} runners cannot be placed: each needs "
            f"{format_amounts(self._bundle)}. After {config.placement_timeout_s:g} s "
            f"(runner.placement_timeout_s) the cluster of {len(nodes)} node(s) has {total}, free now {free}. "
            "Lower n_runners or runner={'num_cpus': ...}, end other work on the cluster, or add nodes"
        )


def _describe(states: Mapping[str, StartState]) -> str:
    described = "; ".join(f"{name} {state}" for name, state in states.items())
    load = f"{os.getloadavg()[0]:.1f} on {available_cpus()} CPUs"
    return f"{described}. The load of the driver's machine is {load}"


def read_start_states(actors: Mapping[str, Any], bundle: Mapping[str, float]) -> dict[str, StartState]:
    """Return how far actors that are not up have come, from Ray.

    Ray calls an actor "pending" both without resources and during its start. Only in the first case its
    request is among the cluster's demands.

    Args:
        bundle: resources of each actor.
    """
    demands = get_cluster_status(ray.get_runtime_context().gcs_address).resource_demands.ray_task_actor_demand
    wanted = {name: amount for name, amount in bundle.items() if amount}
    unplaced = bool(wanted) and any(
        request.bundle.keys() == wanted.keys()
        and all(math.isclose(request.bundle[name], amount) for name, amount in wanted.items())
        for demand in demands
        for request in demand.bundles_by_count
    )
    return {name: _state(actor._actor_id.hex(), unplaced) for name, actor in actors.items()}


def _state(actor_id: str, unplaced: bool) -> StartState:
    try:
        # `ray.util.state` asks the cluster at RAY_ADDRESS or on this machine, which may be another one
        pid = ray_state.actors(actor_id).get("Pid", 0)
    except RayError as error:
        logger.debug("no state of actor %s: %s", actor_id, error)
        pid = 0
    if pid:
        return StartState("loading", pid, actor_id)
    return UNPLACED if unplaced else StartState("starting", 0, actor_id)


def _failure_message(error: BaseException) -> str:
    reason = summarize_ray_error(error)
    hint = (
        ". A module that the agent needs must be importable on every node: put it next to the script, in the "
        "job's working directory, or install it"
    )
    return f"the runners did not start: {reason}{hint if 'No module named' in reason else ''}"


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
            ConfigError: `n` is out of range, or the runners end by themselves (`max_rollouts`).
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
        """Wait until new runners are up, without those that a resize takes away meanwhile.

        Others start in the place of those that die, and are added to `runners`: a process may be killed, and
        Ray may place a runner on a node that is being lost.
        """
        while waiting := {
            runner.name: runner.actor
            for runner in runners
            if runner.node is None and runner.name in self._runners
        }:
            try:
                died = await StartUp(waiting, self._config, on_up=self._begin).wait()
            except RaylightError:
                if self._runners.keys() >= waiting.keys():
                    raise
                continue
            for name, error in died.items():
                reason = summarize_ray_error(error)
                if name in self._runners:
                    await self._count_loss(reason)
                if name in self._runners:  # no resize has taken it away, before or meanwhile
                    ray.kill(self._runners.pop(name).actor)
                    logger.warning("%s died while it started (%s); another runner starts", name, reason)
                    runners.append(self._start_runner())

    async def _count_loss(self, reason: str) -> None:
        """Count a runner that died; raise RunnerLostError if too many did in a row."""
        succeeded = (await self._store.statistics()).get("rollouts_succeeded", 0)
        self.lost += 1
        self._lost_in_a_row = 1 if succeeded > self._succeeded else self._lost_in_a_row + 1
        self._succeeded = succeeded
        if self._lost_in_a_row > self._config.max_restarts:
            raise RunnerLostError(
                f"{self._lost_in_a_row} runners died and no rollout succeeded meanwhile; the last error: "
                f"{reason}. See its log with `ray logs actor`, or raise RunnerConfig.max_restarts"
            )

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
            reason = summarize_ray_error(error)
        requeued = await self._store.release_worker(runner.worker_id, reason)
        if error is not None:
            await self._count_loss(reason)
        logger.warning(
            "%s ended (%s); %d rollouts go back to the queue and another runner starts",
            runner.name,
            reason,
            requeued,
        )
        await self._replace(runner.name, reason)

    async def _replace(self, name: str, reason: str) -> None:
        """Start a runner in the place of one that ended, if the pool still lacks one.

        A replacement without resources waits for them as long as other runners work.

        Raises:
            RunnerLostError: the replacement cannot be placed or cannot load the agent, or too many died.
        """
        if len(self._runners) >= self._config.n:
            return
        starting = [self._start_runner()]
        while True:
            try:
                await self._bring_up(starting)
                return
            except (PlacementError, RunnerLostError) as error:
                if not self.size or not isinstance(error, PlacementError):
                    raise RunnerLostError(
                        f"{name} ended ({reason}) and could not be replaced: {error}"
                    ) from None
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
            try:
                _, stuck = await asyncio.wait(probes, timeout=self._config.stuck_after_s)
                for task in stuck:
                    logger.warning(
                        "a runner did not respond for %g s and is killed", self._config.stuck_after_s
                    )
                    ray.kill(probes[task])
            finally:  # also at the end of the run; `watch` handles runners that died
                await cancel_all(probes)

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
