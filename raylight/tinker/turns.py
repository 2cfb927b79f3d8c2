"""The order of training requests: those of a model by their numbers, those of all models in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from raylight._utils.aio import BroadcastCondition, cancel_all
from raylight.http.errors import RequestError
from raylight.tinker.promises import ResultBody

Work = Callable[[], Awaitable[ResultBody]]
GAP_S = 330.0
"""Seconds for which requests wait for an earlier one of their model. The SDK retries for 300 s."""


class ModelTurns:
    """The requests of one model, one after another by their numbers, from 0 on.

    A model has at most one request that waits for the trainer. So the models take turns: the lock is
    first in, first out.

    Args:
        trainer: lock of the trainer, which all models share.
        limit: requests that may wait.
    """

    def __init__(self, trainer: asyncio.Lock, limit: int, gap_s: float = GAP_S) -> None:
        self._trainer, self._limit, self._gap_s = trainer, limit, gap_s
        self._waiting: dict[int, tuple[Work | None, asyncio.Future[ResultBody]]] = {}
        self._next = 0
        self._changed = BroadcastCondition()
        self._task = asyncio.create_task(self._run())

    def submit(self, number: int | None, work: Work | None) -> asyncio.Future[ResultBody]:
        """Execute a request when its turn comes.

        Args:
            number: None for the one after all others.
            work: None for a request that was rejected; its number is used up.

        Raises:
            RequestError: 429, too many requests wait; 400, the number was used.
        """
        if number is None:
            number = max(self._waiting, default=self._next - 1) + 1
        if number < self._next or number in self._waiting:
            raise RequestError(f"seq_id: {number} was used before for this model")
        # the next one is always taken, since all others wait for it
        if len(self._waiting) >= self._limit and number != self._next:
            raise RequestError(
                f"{len(self._waiting)} requests of this model wait already; send this one again later", 429
            )
        future: asyncio.Future[ResultBody] = asyncio.get_running_loop().create_future()
        self._waiting[number] = work, future
        self._changed.notify_all()
        return future

    async def close(self) -> None:
        """End the requests that wait or run."""
        await cancel_all([self._task])
        for _, future in self._waiting.values():
            future.cancel()
        self._waiting.clear()

    async def _run(self) -> None:
        while True:
            await self._changed.wait_for(lambda: bool(self._waiting))
            if not await self._changed.wait_for(lambda: self._next in self._waiting, self._gap_s):
                self._fail_waiting()
                continue
            work, future = self._waiting.pop(self._next)
            self._next += 1
            if work is not None:
                await self._execute(work, future)

    async def _execute(self, work: Work, future: asyncio.Future[ResultBody]) -> None:
        try:
            async with self._trainer:
                future.set_result(await work())
        except asyncio.CancelledError:
            future.cancel()
            raise
        except Exception as error:  # of any kind: the client fetches it
            future.set_exception(error)

    def _fail_waiting(self) -> None:
        """Fail the requests after one that did not come: without it they would train something else."""
        error = RequestError(
            f"request {self._next} of this model did not arrive within {self._gap_s:g} s, and this one comes "
            "after it; send all of them again"
        )
        self._next = max(self._waiting) + 1
        for work, future in self._waiting.values():
            if work is not None:  # nobody waits for a rejected request
                future.set_exception(error)
        self._waiting.clear()
