"""The store with waiting: every wait is on an event. Runs in any asyncio loop, inside a Ray actor or in a test."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from raylight.store.core import StoreCore
from raylight.types import (
    FINISHED,
    AttemptStatus,
    CallKey,
    Failure,
    FinishedRollout,
    Generation,
    Rollout,
    RolloutRequest,
    Span,
)


@dataclass(eq=False)
class FinishWaiter:
    """Waits until `needed` more of a set of rollouts are decided."""

    needed: int
    done: asyncio.Future[None]


class StoreService:
    """Asynchronous face of StoreCore; `StoreClient` documents each method."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._core = StoreCore(clock)
        self._queued = asyncio.Condition()
        self._calls_closed = asyncio.Condition()
        self._waiters: dict[str, set[FinishWaiter]] = {}

    async def enqueue(self, requests: list[RolloutRequest]) -> list[Rollout]:
        rollouts = self._core.enqueue(requests)
        await self._wake_dequeuers()
        return rollouts

    async def dequeue(self, worker_id: str, limit: int, timeout: float) -> list[Rollout]:
        async with self._queued:
            try:
                await asyncio.wait_for(self._queued.wait_for(lambda: self._core.has_waiting), timeout)
            except TimeoutError:
                return []
            return self._core.dequeue(worker_id, limit)

    async def finish_attempt(
        self, rollout_id: str, attempt_id: str, status: AttemptStatus, failure: Failure | None, spans: list[Span], timeout: float
    ) -> Rollout:
        if not await self._calls_settled(rollout_id, attempt_id, timeout) and status == "succeeded":
            lost = self._core.count_open_calls(rollout_id, attempt_id)
            error = f"LostGeneration: {lost} calls were not recorded within {timeout:g} s"
            status, failure = "failed", Failure(kind="infrastructure", error=error)
        rollout = self._core.finish_attempt(rollout_id, attempt_id, status, failure, spans)
        await self._after_decision([rollout])
        return rollout

    async def release_worker(self, worker_id: str, why: str) -> int:
        rollouts = self._core.release_worker(worker_id, why)
        await self._after_decision(rollouts)
        return len(rollouts)

    async def cancel(self, rollout_ids: list[str]) -> None:
        self._core.cancel(rollout_ids)
        await self._after_decision([self._core.get(rollout_id) for rollout_id in rollout_ids])

    async def capture(self, opened: list[CallKey], closed: list[tuple[CallKey, Generation | None]]) -> None:
        self._core.open_calls(opened)
        self._core.close_calls(closed)
        if closed:
            async with self._calls_closed:
                self._calls_closed.notify_all()

    async def wait_for_rollouts(self, rollout_ids: list[str], at_least: int | None, timeout: float | None) -> list[Rollout]:
        """Decided rollouts among `rollout_ids`, once there are `at_least` (default all) or the time is over."""
        unique = dict.fromkeys(rollout_ids)
        undecided = [i for i in unique if self._core.get(i).status not in FINISHED]
        wanted = len(unique) if at_least is None else min(at_least, len(unique))
        needed = wanted - (len(unique) - len(undecided))
        if needed > 0:
            waiter = FinishWaiter(needed, asyncio.get_running_loop().create_future())
            for rollout_id in undecided:
                self._waiters.setdefault(rollout_id, set()).add(waiter)
            try:
                await asyncio.wait([waiter.done], timeout=timeout)
            finally:
                for rollout_id in undecided:
                    self._forget(rollout_id, waiter)
        found = [self._core.get(rollout_id) for rollout_id in unique]
        return [rollout for rollout in found if rollout.status in FINISHED]

    async def collect(self, rollout_ids: list[str]) -> list[FinishedRollout]:
        return self._core.collect(rollout_ids)

    async def add_resources(self, resources: dict[str, Any]) -> str:
        return self._core.add_resources(resources)

    async def get_resources(self, resources_id: str) -> dict[str, Any]:
        return self._core.get_resources(resources_id)

    async def statistics(self) -> dict[str, int]:
        return self._core.statistics()

    async def _calls_settled(self, rollout_id: str, attempt_id: str, timeout: float) -> bool:
        """Wait until no call of the attempt is open; False if that did not happen in time."""
        async with self._calls_closed:
            settled = self._calls_closed.wait_for(lambda: self._core.count_open_calls(rollout_id, attempt_id) == 0)
            try:
                await asyncio.wait_for(settled, timeout)
            except TimeoutError:
                return False
        return True

    async def _after_decision(self, rollouts: list[Rollout]) -> None:
        for rollout in rollouts:
            if rollout.status in FINISHED:
                for waiter in self._waiters.pop(rollout.rollout_id, set()):
                    waiter.needed -= 1
                    if waiter.needed == 0 and not waiter.done.done():
                        waiter.done.set_result(None)
        if self._core.has_waiting:
            await self._wake_dequeuers()

    async def _wake_dequeuers(self) -> None:
        async with self._queued:
            self._queued.notify_all()

    def _forget(self, rollout_id: str, waiter: FinishWaiter) -> None:
        waiters = self._waiters.get(rollout_id)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._waiters[rollout_id]
