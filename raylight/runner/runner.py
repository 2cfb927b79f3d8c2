"""A runner: takes rollouts from the store and executes many at once. Needs only a store client and an event loop."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

from raylight.agent.litagent import LitAgent
from raylight.agent.resources import NamedResources
from raylight.runner.execute import execute
from raylight.store.client import StoreClient
from raylight.types import Rollout

POLL_TIMEOUT_S = 30.0
TAKE_AT_ONCE = 8
"""Rollouts per dequeue: few enough that runners share a small batch evenly."""


class Runner:
    """Executes rollouts until it is cancelled.

    Args:
        worker_id: the name under which the store knows this runner.
        max_concurrent: rollouts executed at once.
        secret: the run's secret, from which each attempt's API key is derived.
    """

    def __init__(self, worker_id: str, store: StoreClient, agent: LitAgent, secret: str, max_concurrent: int) -> None:
        self._worker_id = worker_id
        self._store = store
        self._agent = agent
        self._secret = secret
        self._max_concurrent = max_concurrent
        self._threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="rollout")
        self._resources: dict[str, NamedResources] = {}
        self._running: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        """Take and execute rollouts; ends only by cancellation or when the store is gone."""
        try:
            while True:
                await self._wait_for_room()
                room = self._max_concurrent - len(self._running)
                for rollout in await self._store.dequeue(self._worker_id, min(room, TAKE_AT_ONCE), POLL_TIMEOUT_S):
                    self._running.add(asyncio.create_task(self._run(rollout)))
        finally:
            for task in self._running:
                task.cancel()
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def _wait_for_room(self) -> None:
        """Wait until fewer than `max_concurrent` rollouts run, and raise what a finished one raised."""
        full = len(self._running) >= self._max_concurrent
        if full:
            await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
        for task in [t for t in self._running if t.done()]:
            self._running.discard(task)
            task.result()

    async def _run(self, rollout: Rollout) -> None:
        resources = await self._resources_of(rollout)
        outcome = await execute(self._agent, rollout, resources, self._secret, self._threads, time.time)
        await self._store.finish_attempt(rollout, outcome.status, outcome.failure, outcome.spans)

    async def _resources_of(self, rollout: Rollout) -> NamedResources:
        """A version of the resources never changes, so it is fetched once."""
        key = rollout.resources_id
        if key is None:
            return {}
        if key not in self._resources:
            self._resources[key] = await self._store.get_resources(key)
        return self._resources[key]
