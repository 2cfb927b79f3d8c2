"""Client of the replica coordinator, with typed errors and a timeout for every call."""

from __future__ import annotations

import asyncio
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from raylight.engines.protocol import UpdateMode
from raylight.errors import CoordinatorLostError, CoordinatorUnavailableError, summarize_ray_error
from raylight.weight_sync.coordinator import ReplicaCoordinator
from raylight.weight_sync.orders import CatchUp, Order, Versions

GRACE_S = 10.0
"""Time that a caller waits for a response beyond the coordinator's own timeout."""


class CoordinatorClient:
    """All replicas of an engine as one; `ReplicaCoordinator` documents the methods.

    Every method raises CoordinatorLostError if the coordinator's actor is gone, and
    CoordinatorUnavailableError if it does not respond; in the second case it is unknown if the call took
    effect.

    Args:
        coordinator: the actor's handle, or a `ReplicaCoordinator` in this process.
    """

    def __init__(self, coordinator: Any) -> None:
        self._coordinator = coordinator

    # for the trainer

    async def versions(self) -> Versions:
        return await self._call("versions")

    async def publish(
        self,
        version: int,
        payload_ref: list[Any],
        timeout: float,
        mode: UpdateMode = "keep",
        adapter: str | None = None,
    ) -> int:
        return await self._call("publish", version, payload_ref, timeout, mode, adapter, within=timeout)

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

    # for replicas

    async def subscribe(self, replica: str, liveness_ref: list[Any] | None = None) -> CatchUp:
        return await self._call("subscribe", replica, liveness_ref)

    async def next(self, replica: str, after: int, timeout: float) -> list[Order]:
        return await self._call("next", replica, after, timeout, within=timeout)

    async def acknowledge(
        self, replica: str, number: int, failure: str | None = None, result: Any = None
    ) -> None:
        await self._call("acknowledge", replica, number, failure, result)

    async def leave(self, replica: str) -> None:
        await self._call("leave", replica)

    async def _call(self, method: str, *args: Any, within: float = 0.0) -> Any:
        """Call a method that itself takes up to `within` seconds."""
        coordinator, limit = self._coordinator, within + GRACE_S
        target = getattr(coordinator, method)
        try:
            async with asyncio.timeout(limit):
                if isinstance(coordinator, ReplicaCoordinator):
                    return await target(*args)
                return await target.remote(*args)
        except TimeoutError:
            raise CoordinatorUnavailableError(
                f"the replica coordinator did not respond to `{method}` within {limit:g} s"
            ) from None
        except RayTaskError as error:
            raise error.cause from None
        except ActorUnavailableError as error:
            raise CoordinatorUnavailableError(
                f"the replica coordinator cannot be reached for `{method}`: {summarize_ray_error(error)}"
            ) from None
        except RayActorError as error:
            raise CoordinatorLostError(
                f"the replica coordinator's actor is gone: {summarize_ray_error(error)}. Start the run again"
            ) from None
