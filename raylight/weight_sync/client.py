"""The board as replicas and trainer call it: its actor's failures become typed errors, and no call waits for ever."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from raylight.engines.protocol import UpdateMode
from raylight.errors import CoordinatorLostError, CoordinatorUnavailableError, summarize_ray_error
from raylight.weight_sync.coordinator import ReplicaCoordinator
from raylight.weight_sync.orders import Order, State, Versions

GRACE_S = 10.0
"""How much longer than the board itself a caller waits for its answer."""


class CoordinatorClient:
    """All replicas of an engine as one; see `ReplicaCoordinator` for what its methods mean.

    Every method raises CoordinatorLostError when the board's actor is gone, and CoordinatorUnavailableError when it does not answer: whether it
    did what was asked is then not known.

    Args:
        board: the actor's handle, or a `ReplicaCoordinator` in this process.
    """

    def __init__(self, board: Any) -> None:
        self._board = board

    # the trainer's side

    async def versions(self) -> Versions:
        return await self._call("versions")

    async def publish(
        self,
        version: int,
        box: list[Any],
        timeout: float,
        mode: UpdateMode = "keep",
        adapter: str | None = None,
    ) -> int:
        return await self._call("publish", version, box, timeout, mode, adapter, within=timeout)

    async def drop_adapter(self, name: str, timeout: float) -> None:
        await self._call("drop_adapter", name, timeout, within=timeout)

    async def sleep(self, timeout: float, level: int = 1) -> dict[str, str | None]:
        return await self._call("sleep", timeout, level, within=timeout)

    async def wake(self, timeout: float) -> None:
        await self._call("wake", timeout, within=timeout)

    async def probe(
        self, ids: list[int], timeout: float, adapter: str | None = None
    ) -> dict[str, list[float]]:
        return await self._call("probe", ids, timeout, adapter, within=timeout)

    # the replicas' side

    async def subscribe(self, replica: str, lifeline: list[Any] | None = None) -> State:
        return await self._call("subscribe", replica, lifeline)

    async def next(self, replica: str, after: int, timeout: float) -> list[Order]:
        return await self._call("next", replica, after, timeout, within=timeout)

    async def acknowledge(
        self, replica: str, number: int, failure: str | None = None, result: Any = None
    ) -> None:
        await self._call("acknowledge", replica, number, failure, result)

    async def leave(self, replica: str) -> None:
        await self._call("leave", replica)

    async def _call(self, method: str, *args: Any, within: float = 0.0) -> Any:
        """Ask the board, which itself takes up to `within` seconds."""
        target = getattr(self._board, method)
        try:
            async with asyncio.timeout(within + GRACE_S):
                return await (
                    target(*args) if isinstance(self._board, ReplicaCoordinator) else target.remote(*args)
                )
        except TimeoutError:
            raise CoordinatorUnavailableError(
                f"the board did not answer `{method}` within {within + GRACE_S:g} s"
            ) from None
        except RayTaskError as error:
            raise error.cause from None
        except ActorUnavailableError as error:
            raise CoordinatorUnavailableError(
                f"the board cannot be reached for `{method}`: {summarize_ray_error(error)}"
            ) from None
        except RayActorError as error:
            raise CoordinatorLostError(
                f"the board's actor is gone: {summarize_ray_error(error)}. Start the run again"
            ) from None
