"""Execution of the coordinator's orders on one replica's engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from ray.exceptions import RayError

from raylight.aio import BroadcastCondition
from raylight.engines.protocol import Engine, LoraAdapter
from raylight.errors import (
    CoordinatorLostError,
    CoordinatorUnavailableError,
    WeightSyncError,
    summarize_ray_error,
)
from raylight.weight_sync.client import CoordinatorClient
from raylight.weight_sync.coordinator import POLL_TIMEOUT_S
from raylight.weight_sync.orders import Order

logger = logging.getLogger(__name__)

RETRY_DELAY_S = 1.0
"""Delay between two calls to a coordinator that does not respond."""
FETCH_SHARE = 0.8
"""Share of an order's timeout for fetching its payload. The rest is time to report the failure to the
publisher."""


async def fetch_payload(payload_ref: list[Any]) -> Any:
    """Fetch a payload from Ray's object store. Arrays that are on this node are mapped, not copied."""
    return await payload_ref[0]


class OrderExecutor:
    """Keeps one engine in the state that the coordinator orders.

    Args:
        replica: the replica's name.
        coordinator: the actor's handle, or a `ReplicaCoordinator` in this process.
        on_coordinator_lost: called once, when the coordinator's actor is gone, and with it the run.
        fetch: fetches the payload of an order.
        retry_delay_s: delay between two calls to a coordinator that does not respond.
    """

    def __init__(
        self,
        replica: str,
        engine: Engine,
        coordinator: Any,
        on_coordinator_lost: Callable[[], Awaitable[None]],
        *,
        fetch: Callable[[list[Any]], Awaitable[Any]] = fetch_payload,
        retry_delay_s: float = RETRY_DELAY_S,
    ) -> None:
        self._replica, self._engine, self._client = replica, engine, CoordinatorClient(coordinator)
        self._on_coordinator_lost = on_coordinator_lost
        self._fetch, self._retry_delay_s = fetch, retry_delay_s
        self._executed = 0
        """Number of the last order that was executed, successfully or not."""
        self._closed = False
        self._closing = BroadcastCondition()
        self._failure: str | None = None

    async def catch_up(self, liveness_ref: list[Any] | None = None) -> None:
        """Subscribe and execute all current orders. To be called before the engine serves.

        Args:
            liveness_ref: one-element list holding a reference to the result of the coordinator's
                `wait_forever`, through which the coordinator detects this replica's death.

        Raises:
            WeightSyncError: the engine could not be brought into the state of the other replicas.
            CoordinatorLostError: the coordinator's actor is gone; `on_coordinator_lost` has been called.
        """
        try:
            current = await self._client.subscribe(self._replica, liveness_ref)
            await self._execute_or_raise(current.orders)
            self._executed = current.number
            await self._client.acknowledge(self._replica, current.number)
            while orders := await self._client.next(self._replica, self._executed, 0.0):  # issued meanwhile
                await self._execute_or_raise(orders)
        except CoordinatorLostError:
            await self._on_coordinator_lost()
            raise

    async def run(self) -> None:
        """Execute orders until `close`, or until the coordinator's actor is gone."""
        try:
            while not self._closed:
                await self._retry_while_unavailable(self._poll)
        except CoordinatorLostError:
            await self._on_coordinator_lost()
        except (
            Exception
        ) as error:  # no one awaits this task: `check_health` reports it, and Serve replaces the replica
            if not self._closed:
                self._failure = f"the replica no longer executes orders: {type(error).__name__}: {error}"
                logger.exception("replica %s failed: %s", self._replica, self._failure)

    def check_health(self) -> None:
        """Check that orders are still executed.

        Raises:
            WeightSyncError: `run` ended with an error; the replica must be replaced.
        """
        if self._failure:
            raise WeightSyncError(self._failure)

    async def close(self) -> None:
        """Unsubscribe, so that no order waits for this replica, and end `run`."""
        self._closed = True
        self._closing.notify_all()
        try:
            await self._client.leave(self._replica)
        except (CoordinatorLostError, CoordinatorUnavailableError) as error:
            logger.info("replica %s could not unsubscribe: %s", self._replica, error)

    async def _poll(self) -> None:
        """Wait for the next orders and execute them.

        A separate frame, so that no reference to an order and its payload survives while the next poll waits.
        """
        await self._execute(await self._client.next(self._replica, self._executed, POLL_TIMEOUT_S))

    async def _execute_or_raise(self, orders: list[Order]) -> None:
        if failures := await self._execute(orders):
            raise WeightSyncError(f"the replica cannot catch up with the others: {'; '.join(failures)}")

    async def _execute(self, orders: list[Order]) -> list[str]:
        """Execute and acknowledge orders; returns the failures."""
        failures = []
        for order in orders:
            failure, result = None, None
            try:
                result = await self._apply(order)
            except Exception as error:  # of any kind: the publisher must receive it instead of a timeout
                is_typed = isinstance(error, WeightSyncError)
                failure = str(error) if is_typed else f"{type(error).__name__}: {summarize_ray_error(error)}"
                failures.append(failure)
            await self._acknowledge(order.number, failure, result)
            self._executed = order.number
        return failures

    async def _acknowledge(self, number: int, failure: str | None, result: Any) -> None:
        async def acknowledge() -> None:
            await self._client.acknowledge(self._replica, number, failure, result)

        await self._retry_while_unavailable(acknowledge)

    async def _retry_while_unavailable(self, call: Callable[[], Awaitable[None]]) -> None:
        """Repeat a call while the coordinator does not respond.

        Ends by itself when Ray reports its actor as dead.
        """
        while not self._closed:
            try:
                return await call()
            except CoordinatorUnavailableError as error:
                logger.warning("replica %s retries in %g s: %s", self._replica, self._retry_delay_s, error)
            await self._closing.wait_for(lambda: self._closed, self._retry_delay_s)

    async def _apply(self, order: Order) -> Any:
        """Execute one order on the engine; returns its result, if it has one."""
        engine = self._engine
        match order.kind:
            case "weights":
                await engine.load_weights(order.version, await self._payload(order), order.mode)
            case "adapter":
                adapter = await self._payload(order)
                if not isinstance(adapter, LoraAdapter):
                    raise WeightSyncError(
                        f"the payload of {order} is a {type(adapter).__name__}; it must be a "
                        "raylight.engines.protocol.LoraAdapter"
                    )
                await engine.load_adapter(str(order.adapter), order.version, adapter, order.mode)
            case "drop_adapter":
                await engine.drop_adapter(str(order.adapter))
            case "sleep":
                return await engine.sleep(order.level)
            case "wake":
                await engine.wake()
            case "probe":
                return await engine.logprobs(list(order.ids), order.adapter)

    async def _payload(self, order: Order) -> Any:
        assert order.payload_ref is not None
        limit = FETCH_SHARE * order.timeout
        try:
            async with asyncio.timeout(limit):
                return await self._fetch(order.payload_ref)
        except TimeoutError:
            raise WeightSyncError(
                f"{order} could not be fetched within {limit:g} s; check the network to the publisher's node"
            ) from None
        except RayError as error:
            raise WeightSyncError(
                f"the payload of {order} is lost because its publisher died ({summarize_ray_error(error)}); "
                "publish a new version"
            ) from None
