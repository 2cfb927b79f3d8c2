"""Callers that wait until rollouts are decided."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from raylight._utils.aio import BroadcastCondition


@dataclass(eq=False)
class FinishWaiter:
    """A caller that waits until `needed` more of its rollouts are decided."""

    needed: int
    done: asyncio.Future[None]


class FinishWaiters:
    """Waiting callers, by the rollouts they wait for."""

    def __init__(self) -> None:
        self._waiters: dict[str, set[FinishWaiter]] = {}
        self._n_waiting = 0
        self._left = BroadcastCondition()

    async def wait(self, undecided: list[str], needed: int, timeout: float | None) -> None:
        """Wait until `needed` of these rollouts are decided, for `timeout` seconds, or until `wake_all`."""
        waiter = FinishWaiter(needed, asyncio.get_running_loop().create_future())
        for rollout_id in undecided:
            self._waiters.setdefault(rollout_id, set()).add(waiter)
        self._n_waiting += 1
        try:
            await asyncio.wait([waiter.done], timeout=timeout)
        finally:
            self._n_waiting -= 1
            self._left.notify_all()
            for rollout_id in undecided:
                waiters = self._waiters.get(rollout_id, set())
                waiters.discard(waiter)
                if not waiters:
                    self._waiters.pop(rollout_id, None)

    def decide(self, rollout_ids: Iterable[str]) -> None:
        """Wake the callers whose last needed rollout is among these."""
        for rollout_id in rollout_ids:
            for waiter in self._waiters.pop(rollout_id, set()):
                waiter.needed -= 1
                if waiter.needed == 0 and not waiter.done.done():
                    waiter.done.set_result(None)

    def wake_all(self) -> None:
        """Wake all callers."""
        for waiter in {waiter for waiters in self._waiters.values() for waiter in waiters}:
            if not waiter.done.done():
                waiter.done.set_result(None)

    async def empty(self) -> None:
        """Wake all callers, and wait until they have continued."""
        self.wake_all()
        await self._left.wait_for(lambda: not self._n_waiting)
