"""How calls travel to the store: together, in order, and only once.

Laws: what is called in one turn of the event loop travels in one message, and while a message is under way the next one gathers,
so that a busy client needs few messages and an idle one waits for nothing; calls of one client take effect in their order; when the
store's actor dies and starts again, Ray sends what had no answer once more, and the store recognises it.
"""

from __future__ import annotations

import asyncio
import uuid
import weakref
from typing import Any

from raylight.errors import StoreLostError, summarize_ray_error
from raylight.store.service import Call, StoreService

MAX_BATCH = 512
"""Calls in one message."""


class Channel:
    """Sends calls to a store.

    Args:
        target: a StoreActor's handle, or a StoreService in this process.
    """

    def __init__(self, target: Any) -> None:
        self.target = target
        self._lanes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, CallBatcher] = (
            weakref.WeakKeyDictionary()
        )

    async def call(self, method: str, *args: Any) -> Any:
        """A call that never waits in the store; it shares its message with others."""
        loop = asyncio.get_running_loop()
        if loop not in self._lanes:
            self._lanes[loop] = CallBatcher(self)
        return await self._lanes[loop].call(method, args)

    async def send(self, method: str, *args: Any) -> Any:
        """A message of its own, for what may wait.

        Raises:
            StoreLostError: the store's actor is gone for good.
        """
        if isinstance(self.target, StoreService):
            return await getattr(self.target, method)(*args)
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await getattr(self.target, method).remote(*args)
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise StoreLostError(
                f"the store actor is gone: {summarize_ray_error(error)}. Start the run again"
            ) from None


class CallBatcher:
    """Calls made on one event loop, waiting to be sent."""

    def __init__(self, channel: Channel) -> None:
        self._channel = weakref.proxy(channel)
        self._name = uuid.uuid4().hex
        self._sent = 0
        self._waiting: list[tuple[Call, asyncio.Future[Any]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def call(self, method: str, args: tuple[Any, ...]) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(((method, args), answer))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send())
        return await answer

    async def _send(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            self._sent += 1
            try:
                results = await self._channel.send(
                    "call", [call for call, _ in batch], self._name, self._sent
                )
            except BaseException as error:  # whoever waits for an answer must hear of it
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(
                            error if isinstance(error, Exception) else StoreLostError(f"not sent: {error!r}")
                        )
                if not isinstance(error, Exception):
                    raise
            else:
                for (_, answer), (succeeded, result) in zip(batch, results, strict=True):
                    if not answer.done():
                        answer.set_result(result) if succeeded else answer.set_exception(result)
        self._sender = None  # it would keep its loop alive, and with it this lane
