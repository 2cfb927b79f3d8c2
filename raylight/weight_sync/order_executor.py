"""Execution of the coordinator's orders on one replica's engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ray.exceptions import RayError

from raylight._utils.aio import BroadcastCondition
from raylight.engines.protocol import Engine, LoraAdapter
from raylight.errors import (
    CoordinatorLostError,
    CoordinatorUnavailableError,
    NotSubscribedError,
    WeightSyncError,
    summarize_ray_error,
)
from raylight.weight_sync.client import RETRY_DELAY_S, ReplicaClient
from raylight.weight_sync.orders import Order
from raylight.weight_sync.quorum import LATE_SHARE
from raylight.weight_sync.transfer_follower import TransferFollower

T = TypeVar("T")
logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 30.0
"""Longest time that a poll waits for an order."""
HEARTBEAT_S = 2.0
"""Time between two heartbeats of a replica that executes an order."""
FETCH_SHARE = 0.8
"""Share of a replica's time for fetching the payload. The rest is time to report the failure."""


async def fetch_payload(payload_ref: list[Any]) -> Any:
    """Fetch a payload from Ray's object store. Arrays that are on this node are mapped, not copied."""
    return await payload_ref[0]


@dataclass
class EngineState:
    """The orders that an engine has executed, so that it executes none twice."""

    weights: int = 0
    adapters: dict[str, int] = field(default_factory=dict)
    asleep: bool = False
    sleep_result: Any = None
    """Reason why sleeping freed nothing."""


class OrderExecutor:
    """Keeps one engine in the state that the coordinator orders.

    Args:
        replica: the replica's name.
        coordinator: the actor's handle, or a `ReplicaCoordinator` in this process.
        on_coordinator_lost: called once, when the coordinator's actor is gone, and with it the run.
        call_forever: calls the coordinator's `wait_forever` and returns a one-element list holding the
            reference to its result, through which the coordinator detects this replica's death.
        handle: handle of this replica's actor, through which the coordinator kills it if it is frozen.
        fetch: fetches the payload of an order.
        retry_delay_s: delay between two calls to a coordinator that does not respond.
        heartbeat_s: time between two heartbeats during an order.
        node: network address of this node.
    """

    def __init__(
        self,
        replica: str,
        engine: Engine,
        coordinator: Any,
        on_coordinator_lost: Callable[[], Awaitable[None]],
        *,
        call_forever: Callable[[], list[Any]] | None = None,
        handle: Any = None,
        fetch: Callable[[list[Any]], Awaitable[Any]] = fetch_payload,
        retry_delay_s: float = RETRY_DELAY_S,
        heartbeat_s: float = HEARTBEAT_S,
        node: str = "",
    ) -> None:
        self._replica, self._engine, self._client = replica, engine, ReplicaClient(replica, coordinator)
        self._on_coordinator_lost = on_coordinator_lost
        self._call_forever, self._handle = call_forever, handle
        self._fetch, self._retry_delay_s, self._heartbeat_s = fetch, retry_delay_s, heartbeat_s
        self._node = node
        self._state = EngineState()
        self._transfers = TransferFollower(engine, self._client, self._retry_while_unavailable)
        self._executed = 0
        """Number of the last order that was executed, successfully or not."""
        self._subscribed = False
        """True once the replica has been subscribed."""
        self._closed = False
        self._closing = BroadcastCondition()
        self._failure: str | None = None

    @property
    def version(self) -> int:
        """Newest version of the weights or of an adapter that the engine has."""
        return max(self._state.weights, *self._state.adapters.values(), 0)

    async def catch_up(self) -> None:
        """Subscribe and execute all current orders. To be called before the engine serves.

        Raises:
            WeightSyncError: the engine could not be brought into the state of the other replicas.
            CoordinatorLostError: the coordinator's actor is gone; `on_coordinator_lost` has been called.
        """
        try:
            await self._retry_while_unavailable(self._subscribe)
            await self._retry_while_unavailable(self._execute_issued_meanwhile)
        except NotSubscribedError:  # the coordinator was restarted meanwhile
            await self.catch_up()
        except CoordinatorLostError:
            await self._on_coordinator_lost()
            raise

    async def run(self) -> None:
        """Execute orders until `close`, or until the coordinator's actor is gone."""
        step = self._poll
        try:
            while not self._closed:
                try:
                    await self._retry_while_unavailable(step)
                    step = self._poll
                except NotSubscribedError:  # possibly once more while it subscribes again
                    logger.info("replica %s subscribes again", self._replica)
                    step = self._subscribe
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
        self._transfers.close()
        self._closing.notify_all()
        try:
            await self._client.leave()
        except (CoordinatorLostError, CoordinatorUnavailableError) as error:
            logger.info("replica %s could not unsubscribe: %s", self._replica, error)

    async def _poll(self) -> None:
        """Wait for the next orders and execute them.

        A separate frame, so that no reference to an order and its payload survives while the next poll waits.
        """
        await self._execute(await self._client.next(self._executed, POLL_TIMEOUT_S))

    async def _subscribe(self) -> None:
        """Subscribe, and bring the engine into the ordered state."""
        returns = self._subscribed
        liveness_ref = self._call_forever() if self._call_forever else None
        held, workers = self._state.weights, self._engine.workers
        current = await self._client.subscribe(liveness_ref, self._handle, returns, held, workers, self._node)
        self._subscribed = True
        self._transfers.reset()
        if returns:
            await self._undo_unordered(current.orders)
        await self._execute_or_raise(current.orders)
        self._executed = current.number
        await self._client.acknowledge(current.number)

    async def _execute_issued_meanwhile(self) -> None:
        while orders := await self._client.next(self._executed, 0.0):
            await self._execute_or_raise(orders)

    async def _undo_unordered(self, orders: list[Order]) -> None:
        """Undo what is no longer ordered; the replica may have missed the order that ended it."""
        subjects = {order.subject for order in orders}
        for adapter in list(self._state.adapters):
            if f"adapter {adapter}" not in subjects:
                await self._engine.drop_adapter(adapter)
                del self._state.adapters[adapter]
        if self._state.asleep and "sleep" not in subjects:
            await self._engine.wake()
            self._state.asleep = False

    async def _execute_or_raise(self, orders: list[Order]) -> None:
        if failures := await self._execute(orders):
            raise WeightSyncError(f"the replica cannot catch up with the others: {'; '.join(failures)}")

    async def _execute(self, orders: list[Order]) -> list[str]:
        """Execute and acknowledge orders; returns the failures."""
        failures = []
        for order in orders:
            failure, result = None, None
            try:
                result = await self._with_heartbeats(self._apply(order))
            except Exception as error:  # of any kind: the publisher must receive it instead of a timeout
                is_typed = isinstance(error, WeightSyncError)
                failure = str(error) if is_typed else f"{type(error).__name__}: {summarize_ray_error(error)}"
                failures.append(failure)
            await self._acknowledge(order.number, failure, result)
            self._executed = order.number
        return failures

    async def _acknowledge(self, number: int, failure: str | None, result: Any) -> None:
        async def acknowledge() -> None:
            await self._client.acknowledge(number, failure, result)

        await self._retry_while_unavailable(acknowledge)

    async def _retry_while_unavailable(self, call: Callable[[], Awaitable[T]]) -> T | None:
        """Repeat a call while the coordinator does not respond; return its result.

        Ends by itself when Ray reports its actor as dead, and with None when the replica closes.
        """
        while not self._closed:
            try:
                return await call()
            except CoordinatorUnavailableError as error:
                logger.warning("replica %s retries in %g s: %s", self._replica, self._retry_delay_s, error)
            await self._closing.wait_for(lambda: self._closed, self._retry_delay_s)
        return None

    async def _with_heartbeats(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Await work; tell the coordinator meanwhile that this process is alive."""
        working = asyncio.create_task(work)
        try:
            while not (await asyncio.wait([working], timeout=self._heartbeat_s))[0]:
                with contextlib.suppress(WeightSyncError):  # the acknowledgement reports it
                    await self._client.heartbeat()
            return working.result()
        finally:
            working.cancel()

    async def _apply(self, order: Order) -> Any:
        """Execute one order on the engine, unless it has been; returns its result, if it has one."""
        engine, state = self._engine, self._state
        name = str(order.adapter)
        match order.kind:
            case "weights" if order.version > state.weights:
                state.weights = await self._transfers.receive(order)
            case "adapter" if order.version > state.adapters.get(name, -1):
                adapter = await self._payload(order)
                if not isinstance(adapter, LoraAdapter):
                    raise WeightSyncError(
                        f"the payload of {order} is a {type(adapter).__name__}; it must be a "
                        "raylight.engines.protocol.LoraAdapter"
                    )
                await engine.load_adapter(name, order.version, adapter, order.mode)
                state.adapters[name] = order.version
            case "release":
                await engine.drop_adapter(name)
                state.adapters.pop(name, None)
            case "sleep":
                if not state.asleep:
                    state.sleep_result = await engine.sleep(order.level)
                    state.asleep = True
                return state.sleep_result
            case "wake":
                await engine.wake()
                state.asleep = False
        if order.ids:
            return await engine.logprobs(list(order.ids), order.adapter)
        return None

    async def _payload(self, order: Order) -> Any:
        assert order.payload_ref is not None
        limit = FETCH_SHARE * LATE_SHARE * order.timeout
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
