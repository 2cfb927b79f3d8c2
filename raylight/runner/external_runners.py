"""External runners: started by other processes, they find a run on the cluster by its name and join it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NamedTuple

import ray

from raylight._utils.aio import pause
from raylight.config import RunnerConfig
from raylight.errors import ConfigError, PlacementError, RunnerLostError
from raylight.runner.actor import RunnerPayload
from raylight.runner.pool import RunnerPool
from raylight.runner.runner import HEARTBEAT_S
from raylight.store.client import StoreClient

logger = logging.getLogger(__name__)

RENDEZVOUS_NAME = "rendezvous"
LOOKUP_INTERVAL_S = 1.0
"""Interval between two lookups of a run that has not begun: Ray has no event for a new actor name."""
HEARTBEAT_TIMEOUT_S = 3 * HEARTBEAT_S
"""Time without heartbeats after which a runner counts as dead."""


class RunAccess(NamedTuple):
    """Store, secret and hosts of a run, which an external runner needs to execute its rollouts."""

    store: StoreClient
    secret: str
    gateway_hosts: tuple[str, ...]


class Rendezvous:
    """Ray actor under the run's name at which external runners join. It lives as long as the run."""

    def __init__(self, access: RunAccess) -> None:
        self._access = access
        self._joined = asyncio.Event()

    async def access(self) -> RunAccess:
        return self._access

    async def join(self) -> None:
        self._joined.set()

    async def wait_for_runners(self) -> None:
        """Return once runners have joined."""
        await self._joined.wait()

    async def wait_for_end(self) -> None:
        """Never return: the caller gets a RayActorError when the run ends or its process dies."""
        await asyncio.Event().wait()


async def find_rendezvous(run: str, timeout: float) -> Any:
    """Return the rendezvous of a run, waiting for a run that has not begun.

    Raises:
        ConfigError: no such run began within `timeout` seconds.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + timeout
    while True:
        try:
            return ray.get_actor(RENDEZVOUS_NAME, namespace=run)
        except ValueError:
            if clock() >= deadline:
                raise ConfigError(
                    f"no run {run!r} that runners can join began on this cluster within {timeout:g} s; start "
                    f"its algorithm with Trainer(role='algorithm', run_name={run!r}), or "
                    f"RAYLIGHT_ROLE=algorithm RAYLIGHT_RUN={run}"
                ) from None
        await pause(LOOKUP_INTERVAL_S)


class JoinedPool(RunnerPool):
    """Pool of runners that joined a run.

    When they have executed their `max_rollouts`, other pools of the run continue.
    """

    async def _reject_forever(self) -> None:
        logger.info("all runners have executed max_rollouts=%s", self._config.max_rollouts)


class ExternalRunners:
    """Replaces the RunnerPool in a run whose runners are started and watched by other processes.

    Of the settings it uses `start_timeout_s`, the longest time without any runner (at least
    `HEARTBEAT_TIMEOUT_S`), and `stuck_after_s`, the interval of its checks.
    """

    lost = replaced = 0
    size = 0
    """Number of runners that send heartbeats."""

    def __init__(self, run: str, config: RunnerConfig, store: StoreClient, payload: RunnerPayload) -> None:
        self._run = run
        self._config = config
        self._store = store
        self._access = RunAccess(store, payload.secret, payload.gateway_hosts)
        self._rendezvous: Any = None

    async def start(self) -> None:
        """Start the rendezvous and wait for the first runners.

        Raises:
            PlacementError: no runner joined within `start_timeout_s`.
        """
        self._rendezvous = (
            ray.remote(Rendezvous)
            .options(name=RENDEZVOUS_NAME, namespace=self._run, num_cpus=0, max_concurrency=1000)
            .remote(self._access)
        )
        try:
            await asyncio.wait_for(self._rendezvous.wait_for_runners.remote(), self._config.start_timeout_s)
        except TimeoutError:
            raise PlacementError(self._no_runner_message(self._config.start_timeout_s)) from None

    async def watch(self) -> None:
        """Raise RunnerLostError when no runner has sent a heartbeat for `start_timeout_s`."""
        clock = asyncio.get_running_loop().time
        limit = max(self._config.start_timeout_s, HEARTBEAT_TIMEOUT_S)
        last_beat, beats = clock(), dict[tuple[str, float | None], float]()
        while True:
            await pause(min(self._config.stuck_after_s, self._config.start_timeout_s))
            workers = await self._store.query_workers(status_in=["idle", "busy"])
            known = [(worker.worker_id, worker.last_heartbeat_time) for worker in workers]
            # a killed worker stays in the store, without further heartbeats
            beats = {beat: beats.get(beat, clock()) for beat in known}
            self.size = sum(clock() - noticed < HEARTBEAT_TIMEOUT_S for noticed in beats.values())
            last_beat = max([last_beat, *beats.values()])
            if clock() - last_beat < HEARTBEAT_TIMEOUT_S:
                continue
            if clock() - last_beat >= limit:
                raise RunnerLostError(self._no_runner_message(clock() - last_beat))
            logger.warning(
                "%s has no live runner; start one with `raylight runner AGENT --run %s`", self._run, self._run
            )

    async def resize(self, n: int) -> None:
        """Raise ConfigError: their own processes start and end the runners."""
        raise ConfigError(
            f"the runners of {self._run} are external: start more with `raylight runner AGENT --run "
            f"{self._run} --n-runners {n}`, or end such processes"
        )

    async def stop(self) -> None:
        """End the rendezvous, so that the external runners end too."""
        if self._rendezvous is not None:
            ray.kill(self._rendezvous)

    def _no_runner_message(self, seconds: float) -> str:
        return (
            f"run {self._run} had no runner for {seconds:.0f} s; start one with `raylight runner AGENT --run "
            f"{self._run}`, or wait longer: runner={{'start_timeout_s': ...}}"
        )
