"""A replica's side of the coordinator: polls for tasks, and executes them on the engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import pickle
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, get_args

from ray.exceptions import RayError

from raylight._utils.aio import BroadcastCondition
from raylight.errors import (
    CoordinatorLostError,
    CoordinatorUnavailableError,
    NotSubscribedError,
    WeightSyncError,
    summarize_ray_error,
)
from raylight.types import JsonObject
from raylight.weights.client import RETRY_DELAY_S, call_coordinator
from raylight.weights.coordinator import POLL_TIMEOUT_S
from raylight.weights.orders import FINAL, Order, Phase, ReplicaReport, ReplicaState, Task, TaskAnswer
from raylight.weights.protocol import EngineLoad, LoraAdapter, SyncedEngine
from raylight.weights.quorum import LATE_SHARE

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Time between two reports of a replica that executes a task."""
FETCH_SHARE = 0.8
"""Share of a replica's time for fetching the payload. The rest is time to report the failure."""
PHASES = get_args(Phase)


async def fetch_payload(payload_ref: Sequence[Awaitable[object]]) -> object:
    """Fetch a payload from Ray's object store. Arrays that are on this node are mapped, not copied."""
    return await payload_ref[0]


class OrderExecutor:
    """Keeps one engine in the state that the coordinator orders.

    Args:
        replica: the replica's name.
        coordinator: the actor's handle, or a `ReplicaCoordinator` in this process.
        on_coordinator_lost: called once, when the coordinator's actor is gone, and with it the run.
        measure: returns the engine's load.
        call_forever: calls the coordinator's `wait_forever` and returns a one-element list holding the
            reference to its result, through which the coordinator detects this replica's death.
        handle: handle of this replica's actor, through which the coordinator kills it if it is frozen.
        fetch: fetches the payload of an order.
        retry_delay_s: delay between two calls to a coordinator that does not respond.
        heartbeat_s: time between two reports during a task.
        node: network address of this node.
    """

    def __init__(
        self,
        replica: str,
        engine: SyncedEngine,
        coordinator: object,
        on_coordinator_lost: Callable[[], Awaitable[None]],
        *,
        measure: Callable[[], EngineLoad] | None = None,
        call_forever: Callable[[], list[object]] | None = None,
        handle: object = None,
        fetch: Callable[[Sequence[Awaitable[object]]], Awaitable[object]] = fetch_payload,
        retry_delay_s: float = RETRY_DELAY_S,
        heartbeat_s: float = HEARTBEAT_S,
        node: str = "",
    ) -> None:
        self._replica, self._engine, self._coordinator = replica, engine, coordinator
        self._on_coordinator_lost, self._measure = on_coordinator_lost, measure
        self._call_forever, self._handle, self._node = call_forever, handle, node
        self._fetch, self._retry_delay_s, self._heartbeat_s = fetch, retry_delay_s, heartbeat_s
        self._state = ReplicaState()
        self._answer: TaskAnswer | None = None
        """Outcome of the last task, until the coordinator has it."""
        self._subscribed = self._closed = False
        self._closing = BroadcastCondition()
        self._failure: str | None = None

    @property
    def version(self) -> int:
        """Newest version of the weights or of an adapter that the engine has."""
        return max(self._state.weights, *self._state.adapters.values(), 0)

    async def catch_up(self) -> None:
        """Bring the engine into the state of the other replicas. To be called before the engine serves.

        Raises:
            WeightSyncError: the engine failed to reach it.
            CoordinatorLostError: the coordinator's actor is gone; `on_coordinator_lost` has been called.
        """
        try:
            while not self._state.serves and not self._closed:
                await self._step()
        except CoordinatorLostError:
            await self._on_coordinator_lost()
            raise

    async def run(self) -> None:
        """Execute tasks until `close`, or until the coordinator's actor is gone."""
        try:
            while not self._closed:
                await self._step()
        except CoordinatorLostError:
            await self._on_coordinator_lost()
        except Exception as error:  # no one awaits this task: `check_health` reports it
            if not self._closed:
                self._failure = f"the replica no longer executes orders: {type(error).__name__}: {error}"
                logger.exception("replica %s failed: %s", self._replica, self._failure)

    def check_health(self) -> None:
        """Check that tasks are still executed.

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
            await self._call("leave")
        except (CoordinatorLostError, CoordinatorUnavailableError) as error:
            logger.info("replica %s could not unsubscribe: %s", self._replica, error)

    async def _step(self) -> None:
        """Execute the next task.

        In a separate frame: no reference to a task and its payload survives while the next poll waits.

        Raises:
            WeightSyncError: the engine cannot catch up.
        """
        try:
            await self._subscribe()
            task = await self._poll()
            if task is None:
                return
            self._answer = answer = await self._with_heartbeats(self._execute(task))
            if answer.failure and not answer.lost and not self._state.serves:
                with contextlib.suppress(
                    NotSubscribedError, CoordinatorUnavailableError
                ):  # it ends in any case
                    await self._poll(waits=False)
                raise WeightSyncError(f"the replica cannot catch up with the others: {answer.failure}")
        except NotSubscribedError:
            logger.info("replica %s subscribes again", self._replica)
            self._subscribed = False
        except CoordinatorUnavailableError as error:
            logger.warning("replica %s retries in %g s: %s", self._replica, self._retry_delay_s, error)
            await self._closing.wait_for(lambda: self._closed, self._retry_delay_s)

    async def _subscribe(self) -> None:
        if not self._subscribed:
            liveness_ref = self._call_forever() if self._call_forever else None
            workers = self._engine.workers
            await self._call("subscribe", self._state, liveness_ref, self._handle, workers, self._node)
            self._subscribed = True

    async def _poll(self, waits: bool = True) -> Task | None:
        load = self._measure() if self._measure and self._state.serves else None
        answer = self._answer
        report = ReplicaReport(self._state, answer, load, waits)
        task: Task | None = await self._call("poll", report, within=POLL_TIMEOUT_S if waits else 0.0)
        if self._answer is answer:
            self._answer = None
        return task

    async def _call(self, method: str, *args: object, within: float = 0.0) -> Any:
        return await call_coordinator(self._coordinator, method, self._replica, *args, within=within)

    async def _with_heartbeats(self, work: Coroutine[object, object, TaskAnswer]) -> TaskAnswer:
        """Await work; report meanwhile, which shows that this process is not frozen."""
        working = asyncio.create_task(work)
        try:
            while not (await asyncio.wait([working], timeout=self._heartbeat_s))[0]:
                with contextlib.suppress(WeightSyncError):  # the next poll raises it again
                    await self._poll(waits=False)
            return working.result()
        finally:
            working.cancel()

    async def _execute(self, task: Task) -> TaskAnswer:
        """Execute a task; return its outcome. A failed phase of a transfer is aborted."""
        try:
            return TaskAnswer(task.number, result=await self._apply(task))
        except Exception as error:  # of any kind: the trainer must receive it instead of a timeout
            lost = isinstance(error, ConnectionError) and task.kind in PHASES
            failure = f"{type(error).__name__}: {summarize_ray_error(error)}"
            if lost or isinstance(error, WeightSyncError):
                failure = str(error)
            if lost:
                logger.warning("new weights did not arrive completely: %s", error)
            if task.kind in PHASES:
                with contextlib.suppress(WeightSyncError):  # the engine closes, and is replaced
                    await self._engine.abort_weight_update()
                self._state = replace(self._state, updating=False)
            return TaskAnswer(task.number, failure, lost)

    async def _apply(self, task: Task) -> object:
        """Execute a task on the engine; returns its result, if it has one."""
        engine, kind, order = self._engine, task.kind, task.order
        if kind in PHASES:
            self._state = replace(self._state, updating=True)
        info: Any = None if task.info is None else pickle.loads(task.info)
        changes: JsonObject = {}
        match kind, order:
            case "init", Order():
                await engine.init_weight_transfer_engine(info)
            case "start", Order():
                await engine.start_weight_update(order.mode)
            case "update", Order():
                await engine.update_weights(info)
            case "finish", Order():
                await engine.finish_weight_update(order.version)
            case "send", Order():
                await engine.start_weight_update(order.mode)
                await engine.update_weights(info)
                await engine.finish_weight_update(order.version)
            case "abort", None:
                await engine.abort_weight_update()
                changes = {"updating": False}
            case "serve", None:
                changes = {"serves": True}
            case "adapter", Order():
                name, adapters = str(order.adapter), self._state.adapters
                await engine.load_adapter(name, order.version, await self._payload(order), order.mode)
                changes = {"adapters": {**adapters, name: order.version}}
            case "release", Order():
                await engine.drop_adapter(str(order.adapter))
                left = {n: v for n, v in self._state.adapters.items() if n != order.adapter}
                changes = {"adapters": left}
            case "sleep", Order():
                changes = {"asleep": True, "awake_reason": await engine.sleep(order.level)}
            case "wake", Order():
                await engine.wake()
                changes = {"asleep": False}
            case "probe", Order():
                return await engine.logprobs(list(order.ids), order.adapter)
        if kind in FINAL and order is not None:
            changes = {"weights": order.version, "updating": False}
        self._state = replace(self._state, **changes)
        return None

    async def _payload(self, order: Order) -> LoraAdapter:
        assert order.payload_ref is not None
        limit = FETCH_SHARE * LATE_SHARE * order.timeout
        try:
            async with asyncio.timeout(limit):
                adapter = await self._fetch(order.payload_ref)
        except TimeoutError:
            raise WeightSyncError(
                f"{order} could not be fetched within {limit:g} s; check the network to the publisher's node"
            ) from None
        except RayError as error:
            raise WeightSyncError(
                f"the payload of {order} is lost because its publisher died ({summarize_ray_error(error)}); "
                "publish a new version"
            ) from None
        if not isinstance(adapter, LoraAdapter):
            raise WeightSyncError(
                f"the payload of {order} is a {type(adapter).__name__}; it must be a "
                "raylight.engines.protocol.LoraAdapter"
            )
        return adapter
