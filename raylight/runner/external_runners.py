"""Runners that other processes start: how they find a run on the cluster, and what takes the pool's place in it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any, NamedTuple

import ray

from raylight.config import RunnerConfig
from raylight.errors import ConfigError, PlacementError, RunnerLostError
from raylight.runner.pool import RunnerPayload, RunnerPool
from raylight.runner.runner import HEARTBEAT_S
from raylight.store.client import StoreClient

logger = logging.getLogger(__name__)

RENDEZVOUS_NAME = "desk"
LOOK_S = 1.0
"""Between two looks for a run that is not there yet: Ray tells nobody when a name is given."""
SILENCE_S = 3 * HEARTBEAT_S
"""A runner that is there is heard of more often."""


class Shared(NamedTuple):
    """What runners need of a run."""

    store: StoreClient
    secret: str


class Rendezvous:
    """Where runners of other processes report; a Ray actor under the run's name. Its end is the end of the run."""

    def __init__(self, store: StoreClient, secret: str) -> None:
        self._shared = Shared(store, secret)
        self._joined = asyncio.Event()

    async def shared(self) -> Shared:
        return self._shared

    async def join(self) -> None:
        """Runners are up."""
        self._joined.set()

    async def joined(self) -> None:
        """Answers once runners are up."""
        await self._joined.wait()

    async def over(self) -> None:
        """Never answers: a caller gets a RayActorError when the run is over, or its process is gone."""
        await asyncio.Event().wait()


async def find_rendezvous(run: str, timeout: float) -> Any:
    """The desk of a run, which may begin only now.

    Raises:
        ConfigError: there is none within `timeout` seconds.
    """
    clock, never = asyncio.get_running_loop().time, asyncio.Event()
    end = clock() + timeout
    while True:
        try:
            return ray.get_actor(RENDEZVOUS_NAME, namespace=run)
        except ValueError:
            if clock() >= end:
                raise ConfigError(
                    f"there is no run {run!r} on this cluster that runners can join, and none came within {timeout:g} s; start its "
                    f"algorithm by Trainer(role='algorithm', run_name={run!r}), or RAYLIGHT_ROLE=algorithm RAYLIGHT_RUN={run}"
                ) from None
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(never.wait(), LOOK_S)


class JoinedPool(RunnerPool):
    """A pool beside others of the same run: when its runners have run their `max_rollouts`, the others go on."""

    async def _refuse_forever(self) -> None:
        logger.info("all runners have run their max_rollouts=%s", self._config.max_rollouts)


class RemoteRunners:
    """Takes the place of a RunnerPool in a run whose runners other processes start and watch. Of the settings it reads
    `start_timeout_s`, how long the run may be without any (at least `SILENCE_S`), and `stuck_after_s`, how often it looks."""

    lost = worn_out = 0

    def __init__(self, run: str, config: RunnerConfig, store: StoreClient, payload: RunnerPayload) -> None:
        self._run = run
        self._config = config
        self._store = store
        self._secret = payload.secret
        self._desk: Any = None

    async def start(self) -> None:
        """Open the desk and wait for the first runners.

        Raises:
            PlacementError: none came within `start_timeout_s`.
        """
        self._desk = (
            ray.remote(Rendezvous)
            .options(name=RENDEZVOUS_NAME, namespace=self._run, num_cpus=0, max_concurrency=1000)
            .remote(self._store, self._secret)
        )
        try:
            await asyncio.wait_for(self._desk.joined.remote(), self._config.start_timeout_s)
        except TimeoutError:
            raise PlacementError(self._none_for(self._config.start_timeout_s)) from None

    async def watch(self) -> None:
        """Raise RunnerLostError when there have been no runners for `start_timeout_s`."""
        clock, never = asyncio.get_running_loop().time, asyncio.Event()
        patience = max(self._config.start_timeout_s, SILENCE_S)
        seen, before = clock(), set[tuple[str, float | None]]()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(
                    never.wait(), min(self._config.stuck_after_s, self._config.start_timeout_s)
                )
            workers = await self._store.query_workers(status_in=["idle", "busy"])
            beats = {(worker.worker_id, worker.last_heartbeat_time) for worker in workers}
            if beats - before:  # one whose process was killed stays in the store, and beats no more
                seen, before = clock(), beats
            elif clock() - seen >= patience:
                raise RunnerLostError(self._none_for(clock() - seen))
            elif clock() - seen >= SILENCE_S:
                logger.warning(
                    "%s has no runner now; start some by `raylight runner AGENT --run %s`",
                    self._run,
                    self._run,
                )

    async def stop(self) -> None:
        """Tell the runners that the run is over."""
        if self._desk is not None:
            ray.kill(self._desk)

    def _none_for(self, seconds: float) -> str:
        return (
            f"run {self._run} had no runner for {seconds:.0f} s; start some by `raylight runner AGENT --run {self._run}`, or wait "
            "longer for them: runner={'start_timeout_s': ...}"
        )
