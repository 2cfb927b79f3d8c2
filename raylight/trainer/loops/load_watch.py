"""Watch of the engines' loads during asynchronous training."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import NoReturn

from raylight._utils.aio import cancel_all, pause, task_group
from raylight.trainer.loops.concurrency import Concurrency
from raylight.trainer.loops.training_groups import TrainingGroups
from raylight.trainer.output.report import Metrics
from raylight.weights.client import CoordinatorClient

POLL_S = 1.0
"""Time between two looks at the loads."""


class LoadWatch:
    """Adapts the number of rollouts in progress to the engines' loads, and measures how long these idle.

    Args:
        ceiling: returns the most rollouts in progress, which changes with the number of runners.
    """

    def __init__(
        self, replicas: CoordinatorClient, groups: TrainingGroups, ceiling: Callable[[], int]
    ) -> None:
        self._replicas, self._groups, self._ceiling = replicas, groups, ceiling
        self._concurrency = Concurrency(ceiling())
        self._idle_s: dict[str, float] = {}
        """Idle seconds of each replica since its start."""
        self._reported_idle_s = 0.0

    @contextlib.asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
        self._groups.limit(self._concurrency.limit)
        async with task_group() as tasks:
            watching = tasks.create_task(self._watch())
            try:
                yield
            finally:
                await cancel_all([watching])

    async def _watch(self) -> NoReturn:
        groups = self._groups
        while True:
            loads = await self._replicas.loads()
            self._idle_s |= {name: load.idle_s for name, load in loads.items()}
            now = time.monotonic()
            self._concurrency.ceiling = self._ceiling()
            groups.limit(self._concurrency.observe(loads, groups.in_progress, groups.ended, now))
            await pause(POLL_S)

    def metrics(self) -> Metrics:
        """Return the limit of rollouts, and the idle seconds of all engines since the last call."""
        idle_s = sum(self._idle_s.values())
        since, self._reported_idle_s = idle_s - self._reported_idle_s, idle_s
        return {
            "async/rollout_limit": float(self._concurrency.limit),
            "async/rollouts_in_progress": float(self._groups.in_progress),
            "async/engine_idle_s": max(since, 0.0),
        }
