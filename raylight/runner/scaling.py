"""Requests to change the size of a run in progress: `raylight scale` sends them through the run's store."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from raylight._utils.aio import task_group
from raylight.errors import RaylightError
from raylight.store.client import StoreClient
from raylight.types import JsonObject

POLL_TIMEOUT_S = 60.0


class Resizable(Protocol):
    """A component of a run that consists of a number of equal parts."""

    @property
    def size(self) -> int:
        """Number of parts that work."""

    async def resize(self, n: int) -> None:
        """Change the number of parts, and wait until it is reached."""


@dataclass(eq=False)
class ScaleRequests:
    """The driver's side: executes requests and replies with the sizes before and after.

    A request that is received while an earlier one is executed supersedes it.

    Args:
        run: name of the run.
        components: what can be resized, by name.
        show: receives messages for the user.
    """

    run: str
    store: StoreClient
    components: Mapping[str, Resizable]
    show: Callable[[str], None]
    _executing: dict[str, asyncio.Task[None]] = field(default_factory=dict, init=False)

    def watches(self) -> list[Coroutine[object, object, object]]:
        """Return a coroutine that executes requests until it is cancelled."""
        return [self._run_requests()]

    async def counts(self) -> dict[str, int]:
        """Return nothing: the metrics show the sizes."""
        return {}

    async def _run_requests(self) -> None:
        async with task_group() as tasks:
            while True:
                request = await self.store.next_driver_request(
                    self.run, list(self._executing), POLL_TIMEOUT_S
                )
                if request is not None:
                    key, sizes = request
                    self._executing[key] = tasks.create_task(self._execute(key, sizes))

    async def _execute(self, key: str, sizes: dict[str, int]) -> None:
        changes = await asyncio.gather(*(self._resize(name, n) for name, n in sizes.items()))
        await self.store.reply_to_request(key, dict(zip(sizes, changes, strict=True)))
        del self._executing[key]

    async def _resize(self, name: str, n: int) -> JsonObject:
        component = self.components.get(name)
        if component is None:
            known = ", ".join(self.components)
            return {"error": f"run {self.run} has no {name} to scale; it has: {known}"}
        before, failure = component.size, None
        if n != before:
            self.show(f"scaling from {before} to {n} {name}")
        try:
            await component.resize(n)
        except RaylightError as error:
            failure = f"{type(error).__name__}: {error}"
        after = component.size
        if after != before or failure:
            reached = f"scaled from {before} to {after} {name}"
            self.show(f"{reached}, not to {n}: {failure}" if failure else reached)
        return {"before": before, "after": after, "error": failure}
