"""The replica coordinator: issues weights, adapters, sleep and probes to all replicas, in one sequence.

Replicas subscribe and long-poll; the trainer issues orders, one at a time. Laws:

- A method that issues an order returns only when every live replica has acknowledged it, and `versions`
  changes only then.
- Versions of weights and adapters come from one increasing sequence and are never reused, not even after a
  failure.
- If a replica fails an order, or the timeout expires, the order fails with an error that names the replicas.
  A failed order is withdrawn: a replica that joins later receives what all replicas had before it. An order
  that timed out remains current: it completes when the late replicas acknowledge it, or is superseded.
- A joining replica receives all current orders in one response and counts as live from then on. Dead replicas
  leave the quorum.
- References to superseded payloads are dropped.

Arrays travel through Ray's object store: replicas on the publisher's node map the same shared memory, each
other node gets a copy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError

from raylight.aio import BroadcastCondition
from raylight.engines.protocol import UpdateMode
from raylight.errors import EngineStartError, WeightSyncError
from raylight.weight_sync.orders import TRANSIENT, CatchUp, Kind, Order, Versions

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 30.0
"""Longest time that a replica's poll waits for an order."""


@dataclass
class Subscription:
    """A live replica's progress."""

    acknowledged: int = -1
    """Number of the last acknowledged order; -1 until the replica has caught up."""
    liveness_task: asyncio.Task[None] | None = None
    """Waits for the replica's death."""


@dataclass
class PendingOrder:
    """The order whose publisher is waiting, with the replicas' responses."""

    order: Order
    results: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


class ReplicaCoordinator:
    """State machine of orders, and of the replicas that have executed them.

    Args:
        on_leave: called with the name of each replica that left or died.
    """

    def __init__(self, on_leave: Callable[[str], Awaitable[None]] | None = None) -> None:
        self._on_leave = on_leave
        self._last_number = 0
        self._last_version = 0
        self._current: dict[str, Order] = {}
        """Newest order of each subject: executed by the replicas, or about to be."""
        self._completed: dict[str, Order] = {}
        """Newest order of each subject that all live replicas have executed."""
        self._replicas: dict[str, Subscription] = {}
        self._ever_subscribed = False
        """True once any replica has subscribed. If all die later, an order waits for the replacements that
        Serve starts."""
        self._pending: PendingOrder | None = None
        self._start_failure: str | None = None
        self._changed = BroadcastCondition()

    # called by replicas

    async def wait_forever(self) -> None:
        """Never return.

        A replica owns the result of its call; awaiting that result raises as soon as the replica dies.
        """
        await asyncio.Event().wait()

    async def subscribe(self, replica: str, liveness_ref: list[Any] | None = None) -> CatchUp:
        """Add a replica.

        It executes the returned orders, acknowledges each, and then acknowledges the returned number.

        Args:
            liveness_ref: one-element list holding the reference to the result of `wait_forever` that the
                replica owns.
        """
        self._ever_subscribed = True
        subscription = self._replicas[replica] = Subscription()
        if liveness_ref:
            watch = self._watch_replica(replica, subscription, liveness_ref)
            subscription.liveness_task = asyncio.create_task(watch)
        self._changed.notify_all()
        return CatchUp(
            self._last_number, [order for order in self._orders_after(0) if order.kind not in TRANSIENT]
        )

    async def next(self, replica: str, after: int, timeout: float) -> list[Order]:
        """Return the orders after number `after`; an empty list if there are none within `timeout` seconds.

        Raises:
            WeightSyncError: the replica is not subscribed.
        """
        self._subscription(replica)
        await self._changed.wait_for(
            lambda: bool(self._orders_after(after)) or replica not in self._replicas, timeout
        )
        return self._orders_after(after)

    async def acknowledge(
        self, replica: str, number: int, failure: str | None = None, result: Any = None
    ) -> None:
        """Record that a replica has executed order `number`, or failed to.

        Args:
            failure: reason why the replica failed.

        Raises:
            WeightSyncError: the replica is not subscribed.
        """
        subscription = self._subscription(replica)
        subscription.acknowledged = max(subscription.acknowledged, number)
        if failure:
            logger.warning("engine replica %s failed to execute order %d: %s", replica, number, failure)
            self._withdraw(number)
        if self._pending and self._pending.order.number == number:
            if failure:
                self._pending.failures[replica] = failure
            else:
                self._pending.results.setdefault(replica, result)
        self._update_completed()

    async def leave(self, replica: str) -> None:
        """Remove a replica that stops; unknown names are ignored."""
        if subscription := self._replicas.pop(replica, None):
            if subscription.liveness_task:
                subscription.liveness_task.cancel()
            self._update_completed()
            if self._on_leave is not None:
                await self._on_leave(replica)

    async def report_start_failure(self, reason: str) -> None:
        """Record that a replica failed before it could subscribe."""
        self._start_failure = reason
        self._changed.notify_all()

    # called by the trainer

    async def wait_for_subscribers(self, count: int) -> None:
        """Wait until `count` replicas have caught up.

        Raises:
            EngineStartError: a replica failed to start.
        """
        await self._changed.wait_for(
            lambda: (
                bool(self._start_failure)
                or sum(s.acknowledged >= 0 for s in self._replicas.values()) >= count
            )
        )
        if self._start_failure:
            raise EngineStartError(f"an engine replica failed to start: {self._start_failure}")

    async def versions(self) -> Versions:
        """Return the state that all live replicas have reached."""
        completed = self._completed
        adapters = {o.adapter: o.version for o in completed.values() if o.kind == "adapter" and o.adapter}
        weights, sleep = completed.get("weights"), completed.get("sleep")
        return Versions(weights.version if weights else 0, adapters, sleep.level if sleep else None)

    async def publish(
        self,
        version: int,
        payload_ref: list[Any],
        timeout: float,
        mode: UpdateMode = "keep",
        adapter: str | None = None,
    ) -> int:
        """Send new weights, or a new version of an adapter, to all replicas.

        Args:
            payload_ref: one-element list holding a reference to the arrays, or to the `LoraAdapter`.
            adapter: name of the adapter; None publishes weights.

        Returns:
            The number of replicas that loaded them, once all have.

        Raises:
            WeightSyncError: the version is not new, no replica has subscribed, the engines are asleep, a
                replica failed, or the timeout expired.
        """
        if version <= self._last_version:
            raise WeightSyncError(
                f"version {version} is not newer than {self._last_version}; versions are never reused"
            )
        self._check_ready(awake_for=f"version {version} is published")
        self._last_version = version
        kind: Kind = "weights" if adapter is None else "adapter"
        await self._execute(
            kind, timeout, version=version, payload_ref=payload_ref, mode=mode, adapter=adapter
        )
        return len(self._replicas)

    async def drop_adapter(self, name: str, timeout: float) -> None:
        """Stop serving an adapter on all replicas; an unknown name is ignored.

        Raises:
            WeightSyncError: as for `publish`.
        """
        self._check_ready(awake_for=f"adapter {name!r} is dropped")
        await self._execute("drop_adapter", timeout, adapter=name)

    async def sleep(self, timeout: float, level: int = 1) -> dict[str, str | None]:
        """Free the device memory of all engines.

        Returns:
            By replica, the reason why nothing was freed, or None if memory was freed.

        Raises:
            WeightSyncError: the level is not 1, no replica has subscribed, a replica failed, or the timeout
                expired.
        """
        if level != 1:
            raise WeightSyncError(
                f"sleep level {level} is not supported: level 2 forgets the weights, and waiting requests "
                "would be sampled from empty weights before new ones arrive; use level 1"
            )
        self._check_ready()
        return await self._execute("sleep", timeout, level=level)

    async def wake(self, timeout: float) -> None:
        """Resume all engines after `sleep`.

        Raises:
            WeightSyncError: as for `sleep`.
        """
        self._check_ready()
        await self._execute("wake", timeout)

    async def probe(
        self, ids: list[int], timeout: float, adapter: str | None = None
    ) -> dict[str, list[float]]:
        """Return, by replica, the log-probs of `ids[1:]` at temperature 1.

        Raises:
            WeightSyncError: as for `publish`, or an engine cannot compute log-probs.
        """
        self._check_ready(awake_for="it is probed")
        results = await self._execute("probe", timeout, ids=tuple(ids), adapter=adapter)
        # a replica that joined after the order has no result
        logprobs = {replica: result for replica, result in results.items() if result is not None}
        if not logprobs:
            raise WeightSyncError(
                "no engine replica answered the probe: all were replaced meanwhile; probe again"
            )
        return logprobs

    def _check_ready(self, awake_for: str | None = None) -> None:
        """Raise if there are no replicas, or if they sleep although `awake_for` needs them awake."""
        if not self._ever_subscribed:
            raise WeightSyncError(
                "no engine replica has subscribed to the coordinator; check that the serving deployment is up"
            )
        sleep = self._current.get("sleep")
        if awake_for and sleep and sleep.kind == "sleep":
            raise WeightSyncError(f"the engines are asleep; wake them before {awake_for}")

    async def _execute(self, kind: Kind, timeout: float, **fields: Any) -> dict[str, Any]:
        """Issue an order after all earlier ones, and wait until every replica has executed it.

        Returns:
            The replicas' results.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        if not await self._changed.wait_for(lambda: self._pending is None, timeout):
            reason = f"{self._pending.order} is still under way" if self._pending else "others were before it"
            raise WeightSyncError(f"the {kind} order could not begin within {timeout:g} s: {reason}")
        self._last_number += 1
        order = Order(self._last_number, kind, timeout, **fields)
        pending = self._pending = PendingOrder(order)
        self._current[order.subject] = order
        if kind in TRANSIENT:  # the state that it undoes is no longer complete on all replicas
            self._completed.pop(order.subject, None)
        self._changed.notify_all()
        try:
            done = await self._changed.wait_for(
                lambda: bool(pending.failures) or self._acknowledged_by_all(order), deadline - clock()
            )
        finally:
            self._finish(pending)
        if pending.failures:
            raise WeightSyncError("; ".join(f"{replica}: {why}" for replica, why in pending.failures.items()))
        if not done:
            late = sorted(r for r, s in self._replicas.items() if s.acknowledged < order.number)
            missing = ", ".join(late) or "a replacement for a dead replica"
            raise WeightSyncError(f"{order} did not reach {missing} within {timeout:g} s")
        return pending.results

    def _finish(self, pending: PendingOrder) -> None:
        if pending.order.kind == "probe":  # a late result would have no reader
            self._current.pop("probe", None)
        self._pending = None
        self._changed.notify_all()

    # bookkeeping

    def _subscription(self, replica: str) -> Subscription:
        if replica not in self._replicas:
            raise WeightSyncError(
                f"replica {replica} is not subscribed: it left, or was considered dead. It must start again"
            )
        return self._replicas[replica]

    def _orders_after(self, number: int) -> list[Order]:
        return sorted(
            (order for order in self._current.values() if order.number > number),
            key=lambda order: order.number,
        )

    def _acknowledged_by_all(self, order: Order) -> bool:
        return bool(self._replicas) and all(
            subscription.acknowledged >= order.number for subscription in self._replicas.values()
        )

    def _update_completed(self) -> None:
        """Record the orders that all live replicas have executed by now."""
        for subject, order in list(self._current.items()):
            if not self._acknowledged_by_all(order):
                continue
            if order.kind in TRANSIENT:
                del self._current[subject]
            else:
                self._completed[subject] = order
        self._changed.notify_all()

    def _withdraw(self, number: int) -> None:
        """Replace a failed order by the last completed order of its subject, if any."""
        for subject, order in list(self._current.items()):
            if order.number == number:
                del self._current[subject]
                if completed := self._completed.get(subject):
                    self._current[subject] = completed

    async def _watch_replica(self, replica: str, subscription: Subscription, liveness_ref: list[Any]) -> None:
        """Remove a replica from the quorum when it dies.

        Serve starts a replacement, which subscribes under its own name.
        """
        try:
            await liveness_ref[0]
        except RayError as error:
            logger.warning("engine replica %s died: %s", replica, type(error).__name__)
        if self._replicas.get(replica) is subscription:
            del self._replicas[replica]
            self._update_completed()
        if self._on_leave is not None:
            await self._on_leave(replica)
