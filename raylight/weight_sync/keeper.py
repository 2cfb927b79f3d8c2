"""The keeper of a coordinator: restores it after a restart, and restarts it when it hangs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray

from raylight._utils.aio import BroadcastCondition, pause
from raylight.errors import CoordinatorLostError, CoordinatorUnavailableError
from raylight.weight_sync.client import RETRY_DELAY_S, call_coordinator
from raylight.weight_sync.orders import Snapshot

logger = logging.getLogger(__name__)

WATCH_TIMEOUT_S = 10.0
"""Longest time that the coordinator takes for a response without news."""
PATIENCE_S = 40.0
"""Time without a response after which a coordinator counts as hanging. It doubles with each restart that did
not help: on a busy machine the new process takes long to start."""


def restart_actor(coordinator: Any) -> None:
    """Kill the coordinator's process; Ray starts it again."""
    ray.kill(coordinator, no_restart=False)


class CoordinatorKeeper:
    """Mirrors the coordinator's state in the driver, where it survives the coordinator.

    The references to the current payloads stay alive with it.

    Args:
        coordinator: the actor's handle, or a `ReplicaCoordinator` in this process.
        report: receives messages for the user.
        restart: kills the process of a coordinator that hangs.
    """

    def __init__(
        self,
        coordinator: Any,
        report: Callable[[str], None],
        restart: Callable[[Any], None] = restart_actor,
    ) -> None:
        self._coordinator, self._report, self._restart = coordinator, report, restart
        self._state = Snapshot()
        self._patience_s, self._misses, self._responded = PATIENCE_S, 0, 0.0
        self.changed = BroadcastCondition()
        """Notified when the state has changed."""
        self.restarts = 0
        """Number of times that the coordinator was restored."""

    @property
    def evictions(self) -> int:
        """Number of replicas that were evicted."""
        return len(self._state.evicted)

    @property
    def lacking(self) -> frozenset[str]:
        """Replicas that joined and lack the current weights."""
        return self._state.lacking

    @property
    def live_replicas(self) -> int | None:
        """Number of live replicas; None if it is not known yet."""
        return len(self._state.replicas) if self._state.generation else None

    def update(self, state: Snapshot) -> None:
        """Take over a newer state; report replicas that were evicted."""
        if state.generation < self._state.generation:
            return
        for replica in state.evicted.keys() - self._state.evicted.keys():
            self._report(f"engine replica {replica} was evicted and is replaced: {state.evicted[replica]}")
        self._state = state
        self.changed.notify_all()

    async def run(self) -> None:
        """Follow the coordinator until its actor is gone for good."""
        self._responded = asyncio.get_running_loop().time()
        try:
            while True:
                try:
                    await self._follow()
                    self._patience_s, self._misses = PATIENCE_S, 0
                    self._responded = asyncio.get_running_loop().time()
                except CoordinatorUnavailableError as error:
                    await self._handle_miss(error)
        except CoordinatorLostError as error:
            logger.info("the coordinator is no longer followed: %s", error)
        except Exception:  # no one awaits this task
            logger.exception("the coordinator is no longer followed; it cannot be restored after a restart")

    async def _follow(self) -> None:
        """Wait for the next state, or restore a restarted coordinator."""
        state = await call_coordinator(
            self._coordinator,
            "next_snapshot",
            self._state.generation,
            WATCH_TIMEOUT_S,
            within=WATCH_TIMEOUT_S,
        )
        if state is not None:
            self.update(state)
            return
        await call_coordinator(self._coordinator, "restore", self._state)
        self.restarts += 1
        self._report("the replica coordinator was restarted and restored")

    async def _handle_miss(self, error: CoordinatorUnavailableError) -> None:
        """Restart a coordinator that hangs.

        One miss is not enough: after this process was suspended, its deadlines expire before it reads the
        response.
        """
        self._misses += 1
        silence = asyncio.get_running_loop().time() - self._responded
        logger.info("%s", error)
        if self._misses > 1 and silence >= self._patience_s:
            self._report(f"the replica coordinator did not respond for {silence:.0f} s and is restarted")
            self._patience_s *= 2
            self._responded = asyncio.get_running_loop().time()
            self._restart(self._coordinator)
        else:
            await pause(RETRY_DELAY_S)
