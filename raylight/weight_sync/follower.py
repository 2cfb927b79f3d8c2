"""The replica's side of the board: carry out every order on the engine, and say so."""

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

PAUSE_S = 1.0
"""Between two attempts to reach a board that does not answer."""
FETCH_SHARE = 0.8
"""Of an order's time: if its box does not come within this, the publisher still hears why."""


async def fetch_box(box: list[Any]) -> Any:
    """What a box refers to, from Ray's object store: arrays are mapped, not copied, where they are on this node."""
    return await box[0]


class Follower:
    """Keeps one engine where the board wants it.

    Args:
        name: the replica's.
        board: the board's actor, or a `ReplicaCoordinator` in this process.
        on_orphaned: called once, when the board's actor is gone and the run with it.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        board: Any,
        on_orphaned: Callable[[], Awaitable[None]],
        *,
        fetch: Callable[[list[Any]], Awaitable[Any]] = fetch_box,
        pause_s: float = PAUSE_S,
    ) -> None:
        self._name, self._engine, self._fleet = name, engine, CoordinatorClient(board)
        self._on_orphaned, self._fetch, self._pause_s = on_orphaned, fetch, pause_s
        self._number = 0
        self._closed = False
        self._closing = BroadcastCondition()
        self._broken: str | None = None

    async def catch_up(self, lifeline: list[Any] | None = None) -> None:
        """Join the fleet and do what stands there; to be called before the engine serves.

        Args:
            lifeline: holds the reference to a result of the board's `stay`, by which the board notices that this replica died.

        Raises:
            WeightSyncError: the engine could not be brought to where the others are.
            CoordinatorLostError: the board's actor is gone; `on_orphaned` has been called.
        """
        try:
            state = await self._fleet.subscribe(self._name, lifeline)
            await self._must(state.orders)
            self._number = state.number
            await self._fleet.acknowledge(self._name, state.number)
            while orders := await self._fleet.next(self._name, self._number, 0.0):  # what came meanwhile
                await self._must(orders)
        except CoordinatorLostError:
            await self._on_orphaned()
            raise

    async def follow(self) -> None:
        """Carry out orders until `close`, or until the board's actor is gone."""
        try:
            while not self._closed:
                await self._insist(self._step)
        except CoordinatorLostError:
            await self._on_orphaned()
        except (
            Exception
        ) as error:  # nobody awaits this task: the replica's health tells, and Serve starts another
            if not self._closed:
                self._broken = f"the replica no longer follows its orders: {type(error).__name__}: {error}"
                logger.exception("%s fails: %s", self._name, self._broken)

    def check_health(self) -> None:
        """
        Raises:
            WeightSyncError: the replica no longer follows; it must start again.
        """
        if self._broken:
            raise WeightSyncError(self._broken)

    async def close(self) -> None:
        """Leave the fleet, so that no order waits for this replica; `follow` ends."""
        self._closed = True
        self._closing.notify_all()
        try:
            await self._fleet.leave(self._name)
        except (CoordinatorLostError, CoordinatorUnavailableError) as error:
            logger.info("%s could not say that it leaves: %s", self._name, error)

    async def _step(self) -> None:
        """Has a frame of its own, so that no order, and with it a box, is kept while the next poll waits."""
        await self._carry_out(await self._fleet.next(self._name, self._number, POLL_TIMEOUT_S))

    async def _must(self, orders: list[Order]) -> None:
        if failures := await self._carry_out(orders):
            raise WeightSyncError(f"the replica cannot catch up with the others: {'; '.join(failures)}")

    async def _carry_out(self, orders: list[Order]) -> list[str]:
        """Do what is ordered, and acknowledge each order; returns what failed."""
        failures = []
        for order in orders:
            failure, result = None, None
            try:
                result = await self._do(order)
            except Exception as error:  # whatever it is, the publisher must hear of it instead of waiting
                failure = (
                    str(error)
                    if isinstance(error, WeightSyncError)
                    else f"{type(error).__name__}: {summarize_ray_error(error)}"
                )
                failures.append(failure)
            await self._acknowledge(order.number, failure, result)
            self._number = order.number
        return failures

    async def _acknowledge(self, number: int, failure: str | None, result: Any) -> None:
        async def acknowledge() -> None:
            await self._fleet.acknowledge(self._name, number, failure, result)

        await self._insist(acknowledge)

    async def _insist(self, call: Callable[[], Awaitable[None]]) -> None:
        """Call the board, again and again if it does not answer: Ray tells when it is gone for good."""
        while not self._closed:
            try:
                return await call()
            except CoordinatorUnavailableError as error:
                logger.warning("%s asks again in %g s: %s", self._name, self._pause_s, error)
            await self._closing.wait_for(lambda: self._closed, self._pause_s)

    async def _do(self, order: Order) -> Any:
        engine = self._engine
        match order.kind:
            case "weights":
                await engine.load_weights(order.version, await self._content(order), order.mode)
            case "adapter":
                adapter = await self._content(order)
                if not isinstance(adapter, LoraAdapter):
                    raise WeightSyncError(
                        f"{order} is a {type(adapter).__name__}, and must be a raylight.engines.protocol.Adapter"
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

    async def _content(self, order: Order) -> Any:
        assert order.box is not None
        limit = FETCH_SHARE * order.timeout
        try:
            async with asyncio.timeout(limit):
                return await self._fetch(order.box)
        except TimeoutError:
            raise WeightSyncError(
                f"{order} could not be fetched within {limit:g} s; can this node reach the one that published it?"
            ) from None
        except RayError as error:
            raise WeightSyncError(
                f"{order} is lost, as its publisher is ({summarize_ray_error(error)}); publish a new one"
            ) from None
