"""The store as a Ray actor around StoreService, and the watch over it.

When it is killed it starts again with the state of its file. One that hangs is killed, unless the run did not
start it: then the run ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylight._utils.aio import pause
from raylight._utils.garbage import freeze_startup_objects
from raylight.config import StoreConfig
from raylight.errors import StoreError, StoreLostError
from raylight.store.service import StoreService

STORE_NAME = "store"


class StoreActor(StoreService):
    """Rollouts, spans and generations of one run.

    The actor is asynchronous, so that long polls do not block one another.
    """

    def __init__(self, path: str, config: StoreConfig) -> None:
        super().__init__(path, config)
        freeze_startup_objects()


def start_store(namespace: str, path: str, config: StoreConfig) -> Any:
    """Start the store of a run and return its actor handle.

    The actor is bound to this node, where its file is. If it dies, Ray restarts it here and repeats the calls
    without a response.
    """
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return (
        ray.remote(StoreActor)
        .options(
            name=STORE_NAME,
            namespace=namespace,
            num_cpus=0,
            enable_task_events=False,  # Ray would keep 100,000 of its calls in memory, for `ray list tasks`
            max_concurrency=10_000,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=this_node,
        )
        .remote(path, config)
    )


INTERVAL_S = 10.0
"""Time between a response and the next request."""
PATIENCE_S = 45.0
"""Time without a response after which a store counts as hanging. It doubles with each restart that did not
help."""
GRACE_S = 2.0
"""Further time, in which a process that was suspended itself reads a response that has arrived."""


class StoreWatch:
    """Requests responses from the store's actor, and restarts it when none comes.

    Nothing else would: Ray replaces an actor whose process ends, and waits for one that is frozen.

    Args:
        request: sends a request to the store. Ray repeats it after a restart.
        restart: kills the store's process; Ray starts it again. None for a store that the run did not start.
        report: receives messages for the user.
    """

    def __init__(
        self,
        request: Callable[[], Awaitable[object]],
        restart: Callable[[], None] | None,
        report: Callable[[str], None],
        patience_s: float = PATIENCE_S,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._request, self._restart, self._report = request, restart, report
        self._patience_s, self._interval_s = patience_s, interval_s
        self.restarts = 0
        """Number of times that the store was restarted."""

    async def run(self) -> None:
        """Watch until cancelled, or until the actor is gone for good: then its callers raise the error.

        Raises:
            StoreError: a store that the run did not start hangs.
        """
        while True:
            try:
                await self._await_response()
            except StoreLostError:
                return
            await pause(self._interval_s)

    async def _await_response(self) -> None:
        patience = self._patience_s
        response = asyncio.ensure_future(self._request())
        try:
            while not await _is_done(response, patience) and not await _is_done(response, GRACE_S):
                silence = f"the store did not respond for {patience:g} s"
                if self._restart is not None:
                    self._report(f"{silence} and is restarted from its file")
                    self.restarts += 1
                    self._restart()
                elif patience == self._patience_s:
                    self._report(f"{silence}; it is waited for, because this run did not start it")
                else:
                    raise StoreError(
                        f"{silence}, and this run did not start it (Trainer(store=...)), so it does not "
                        "restart it; end the store's process, which Ray starts again if it has max_restarts, "
                        "and resume the run"
                    )
                patience *= 2
            response.result()
        finally:
            response.cancel()


async def _is_done(response: asyncio.Future[object], timeout: float) -> bool:
    await asyncio.wait([response], timeout=timeout)
    return response.done()
