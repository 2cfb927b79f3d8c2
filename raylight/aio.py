"""What asyncio lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any


async def together(*work: Awaitable[Any]) -> list[Any]:
    """Results of all, in order. When one fails, or this is cancelled, the others are cancelled and waited for first."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


class Signal:
    """Tells all who wait that something may have changed. Everyone then looks for himself, so that a signal is never missed."""

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}  # in order: who waited longest looks first

    def fire(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def until(self, holds: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until the condition holds; False if that did not happen within `timeout` seconds."""
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout
        while not holds():
            left = None if end is None else end - loop.time()
            if left is not None and left <= 0:
                return False
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters[waiter] = None
            try:
                await asyncio.wait([waiter], timeout=left)
            finally:
                self._waiters.pop(waiter, None)
        return True
