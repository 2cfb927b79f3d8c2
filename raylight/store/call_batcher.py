"""Transport of calls to the store: in batches, in order, and executed once.

Laws:
- Calls of one turn of the event loop share a message. While a message is in flight the next one collects, so
  that a busy client sends few messages and an idle one does not wait.
- Calls of one client take effect in their order.
- When the store's actor restarts, Ray repeats the messages without a response, and the store recognises the
  repetition.
"""

from __future__ import annotations

import asyncio
import uuid
import weakref
from typing import Any

from raylight.errors import DiskError, StoreLostError, summarize_ray_error
from raylight.store.service import Call, StoreService

MAX_BATCH = 512
"""Calls in one message."""


class Channel:
    """Connection to a store.

    Args:
        target: a StoreActor's handle, or a StoreService in this process.
    """

    def __init__(self, target: object) -> None:
        self.target = target
        self._batchers: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, CallBatcher] = (
            weakref.WeakKeyDictionary()
        )

    async def call(self, method: str, *args: object) -> Any:
        """Execute a call that never waits in the store; it shares its message with other calls."""
        loop = asyncio.get_running_loop()
        if loop not in self._batchers:
            self._batchers[loop] = CallBatcher(self)
        return await self._batchers[loop].call(method, args)

    async def send(self, method: str, *args: object) -> Any:
        """Execute a call that may wait in the store, in a separate message.

        Raises:
            DiskError: the store's disk has no room for it to start.
            StoreLostError: the store's actor is gone for good for another reason.
        """
        if isinstance(self.target, StoreService):
            return await getattr(self.target, method)(*args)
        from ray.exceptions import RayActorError, RayTaskError

        try:
            return await getattr(self.target, method).remote(*args)
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            cause = summarize_ray_error(error)
            _, is_full, reason = cause.partition(f"{DiskError.__name__}: ")
            if is_full:  # the store did not start, or not start again
                raise DiskError(reason) from None
            raise StoreLostError(f"the store actor is gone: {cause}. Start the run again") from None


class CallBatcher:
    """Calls of one event loop that wait to be sent."""

    def __init__(self, channel: Channel) -> None:
        self._channel = weakref.proxy(channel)
        self._client_id = uuid.uuid4().hex
        self._n_sent = 0
        self._waiting: list[tuple[Call, asyncio.Future[object]]] = []
        self._sender: asyncio.Task[None] | None = None

    async def call(self, method: str, args: tuple[object, ...]) -> Any:
        """Execute a call with the next message; returns its result, or raises its error."""
        result: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(((method, args), result))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_waiting())
        return await result

    async def _send_waiting(self) -> None:
        while self._waiting:
            batch, self._waiting = self._waiting[:MAX_BATCH], self._waiting[MAX_BATCH:]
            self._n_sent += 1
            try:
                results = await self._channel.send(
                    "call", [call for call, _ in batch], self._client_id, self._n_sent
                )
            except BaseException as error:  # every caller that waits for a result must receive the error
                for _, future in batch:
                    if not future.done():
                        future.set_exception(
                            error if isinstance(error, Exception) else StoreLostError(f"not sent: {error!r}")
                        )
                if not isinstance(error, Exception):
                    raise
            else:
                for (_, future), (succeeded, result) in zip(batch, results, strict=True):
                    if not future.done():
                        future.set_result(result) if succeeded else future.set_exception(result)
        self._sender = None  # a reference would keep the event loop alive, and with it this batcher
