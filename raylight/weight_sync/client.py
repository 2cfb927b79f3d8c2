"""Clients of the replica coordinator, with typed errors and a timeout for every call."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

from ray.exceptions import ActorUnavailableError, RayActorError, RayTaskError

from raylight._utils.aio import pause
from raylight.engines.protocol import EngineLoad, UpdateMode
from raylight.errors import CoordinatorLostError, CoordinatorUnavailableError, summarize_ray_error
from raylight.weight_sync.coordinator import ReplicaCoordinator
from raylight.weight_sync.orders import CatchUp, Order, Snapshot
from raylight.weight_sync.transfers import Phase

GRACE_S = 10.0
"""Time that a caller waits for a response beyond the coordinator's own timeout."""
LOADS_TIMEOUT_S = 2.0
"""Time that replicas have to report their loads."""
LOAD_RENEWAL_S = 60.0
"""Time after which a replica renews the call that carries its load."""
HOLD_INTERVAL_S = 5.0
"""Seconds after which a coordinator that holds starts looks again whether those under way are lost."""
RETRY_DELAY_S = 0.5
"""Delay between two calls to a coordinator that does not respond."""


async def call_coordinator(coordinator: Any, method: str, *args: Any, within: float = 0.0) -> Any:
    """Call a method that itself takes up to `within` seconds.

    Args:
        coordinator: the actor's handle, or a `ReplicaCoordinator` in this process.

    Raises:
        CoordinatorLostError: the coordinator's actor is gone for good.
        CoordinatorUnavailableError: it did not respond; it is unknown if the call took effect.
    """
    limit = within + GRACE_S
    target = getattr(coordinator, method)
    try:
        async with asyncio.timeout(limit):
            if isinstance(coordinator, ReplicaCoordinator):
                return await target(*args)
            return await target.remote(*args)
    except TimeoutError:
        raise CoordinatorUnavailableError(
            f"the replica coordinator did not respond to `{method}` within {round(limit, 2):g} s"
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


async def call_until_answered(coordinator: Any, method: str, *args: Any, within: float = 0.0) -> Any:
    """Call a method, and repeat the call while the coordinator restarts.

    Raises:
        CoordinatorLostError, CoordinatorUnavailableError: as for `call_coordinator`, the latter after
            `within` seconds.
    """
    clock = asyncio.get_running_loop().time
    deadline = clock() + within
    while True:
        try:
            remaining = max(deadline - clock(), 0.0)
            return await call_coordinator(coordinator, method, *args, within=remaining)
        except CoordinatorUnavailableError:
            if clock() >= deadline:
                raise
            await pause(RETRY_DELAY_S)


def order_limit(timeout: float, replacement_timeout_s: float) -> float:
    """Return the longest time of an order, with its extensions and one restart of the coordinator.

    A restarted coordinator gives an order its full time again.
    """
    return 2 * (2 * timeout + replacement_timeout_s)


class CoordinatorClient:
    """All replicas of an engine as one, for the trainer; `ReplicaCoordinator` documents the methods.

    If the coordinator restarts meanwhile, the call is repeated and waits until the coordinator is restored
    (see `CoordinatorKeeper`). The methods raise the errors of `call_coordinator` too.

    Args:
        coordinator: the actor's handle, or a `ReplicaCoordinator` in this process.
        on_change: receives the coordinator's state after each order.
        replacement_timeout_s: time that an order may wait for the replacement of lost replicas.
    """

    def __init__(
        self,
        coordinator: Any,
        on_change: Callable[[Snapshot], None] | None = None,
        replacement_timeout_s: float = 0.0,
    ) -> None:
        self._coordinator, self._on_change = coordinator, on_change
        self._replacement_timeout_s = replacement_timeout_s

    async def publish(
        self,
        version: int,
        payload_ref: list[Any] | None,
        timeout: float,
        mode: UpdateMode = "keep",
        adapter: str | None = None,
        token: str = "",
        probe: list[int] | None = None,
    ) -> dict[str, list[float] | None]:
        args = version, payload_ref, timeout, mode, adapter, token, probe
        return await self._issue(timeout, "publish", *args)

    async def fail_publication(self, token: str, reason: str) -> None:
        await call_until_answered(self._coordinator, "fail_publication", token, reason, within=GRACE_S)

    async def pin(self, name: str, version: int, payload_ref: list[Any], timeout: float) -> None:
        await self._issue(timeout, "pin", name, version, payload_ref, timeout)

    async def release(self, name: str, timeout: float) -> None:
        await self._issue(timeout, "release", name, timeout)

    async def sleep(self, timeout: float, level: int = 1) -> dict[str, str | None]:
        return await self._issue(timeout, "sleep", timeout, level)

    async def wake(self, timeout: float) -> None:
        await self._issue(timeout, "wake", timeout)

    async def probe(
        self, ids: list[int], timeout: float, adapter: str | None = None
    ) -> dict[str, list[float]]:
        return await self._issue(timeout, "probe", ids, timeout, adapter)

    @contextlib.asynccontextmanager
    async def starts_held(self) -> AsyncIterator[None]:
        """Let no replica that starts take device memory meanwhile; see `Starts`.

        No order may be issued meanwhile: one that waits for a replacement would wait forever.
        """
        token, limit = uuid.uuid4().hex, max(self._replacement_timeout_s, GRACE_S)
        try:
            while not await call_until_answered(
                self._coordinator, "hold_starts", token, HOLD_INTERVAL_S, within=limit
            ):
                pass
            yield
        finally:
            await call_until_answered(self._coordinator, "release_starts", token, within=limit)

    async def loads(self, timeout: float = LOADS_TIMEOUT_S) -> dict[str, EngineLoad]:
        """Return the loads of the replicas that report within `timeout` seconds.

        Empty while the coordinator restarts: a load that is read again later is of no use.
        """
        try:
            return await call_coordinator(self._coordinator, "loads", timeout, within=timeout)
        except CoordinatorUnavailableError:
            return {}

    async def _issue(self, timeout: float, method: str, *args: Any) -> Any:
        within = order_limit(timeout, self._replacement_timeout_s)
        key = uuid.uuid4().hex
        result, state = await call_until_answered(
            self._coordinator, "issue", key, method, *args, within=within
        )
        if self._on_change is not None:
            self._on_change(state)
        return result


class ReplicaClient:
    """The coordinator as a replica calls it; `ReplicaCoordinator` documents the methods.

    The methods raise the errors of `call_coordinator` too.

    Args:
        replica: the replica's name.
        coordinator: the actor's handle, or a `ReplicaCoordinator` in this process.
    """

    def __init__(self, replica: str, coordinator: Any) -> None:
        self._replica, self._coordinator = replica, coordinator

    async def subscribe(
        self,
        liveness_ref: list[Any] | None,
        handle: Any,
        returns: bool,
        held: int,
        workers: int,
        node: str,
    ) -> CatchUp:
        return await self._call("subscribe", liveness_ref, handle, returns, held, workers, node)

    async def next(self, after: int, timeout: float) -> list[Order]:
        return await self._call("next", after, timeout, within=timeout)

    async def heartbeat(self) -> None:
        await self._call("heartbeat")

    async def acknowledge(self, number: int, failure: str | None = None, result: Any = None) -> None:
        await self._call("acknowledge", number, failure, result)

    async def next_phase(self, after: int, version: int, timeout: float) -> Phase | None:
        return await self._call("next_phase", after, version, timeout, within=timeout)

    async def acknowledge_phase(self, number: int, failure: str | None = None, lost: bool = False) -> None:
        await self._call("acknowledge_phase", number, failure, lost)

    async def report_loads(self, measure: Callable[[], EngineLoad]) -> None:
        """Report the load whenever it is asked for, until the coordinator's actor is gone."""
        number, limit = 0, LOAD_RENEWAL_S
        while True:
            try:
                number = await self._call("report_load", number, measure(), limit, within=limit)
            except CoordinatorUnavailableError:
                await pause(RETRY_DELAY_S)
            except CoordinatorLostError:
                return

    async def enter_start(self, limit: float) -> None:
        """Wait until this replica may take device memory.

        Args:
            limit: seconds for which the coordinator may be away.
        """
        while not await call_until_answered(
            self._coordinator, "enter_start", self._replica, HOLD_INTERVAL_S, within=limit
        ):
            pass

    async def leave(self) -> None:
        await self._call("leave")

    async def _call(self, method: str, *args: Any, within: float = 0.0) -> Any:
        return await call_coordinator(self._coordinator, method, self._replica, *args, within=within)
