"""The sequence of orders: its replicas execute one order after the other. See `coordinator` for the laws."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError

from raylight.aio import BroadcastCondition
from raylight.errors import ReplicaEvictedError, WeightSyncError
from raylight.weight_sync.orders import TRANSIENT, CatchUp, Kind, Order, Snapshot
from raylight.weight_sync.quorum import Quorum, Subscription

logger = logging.getLogger(__name__)

RETURN_TIMEOUT_S = 60.0
"""Time that replicas have for subscribing again after a restart of the coordinator."""


@dataclass
class PendingOrder:
    """The order whose publisher is waiting, with the replicas' responses."""

    order: Order
    issued: float
    evicted: list[str] = field(default_factory=list)
    """Replicas that were evicted meanwhile, with the reasons."""
    results: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


class OrderSequence:
    """State machine of orders, and of the replicas that have executed them.

    Args:
        on_leave: called with the name of each replica that left, died or was evicted.
        kill: called with the handle of each evicted replica's actor.
        replacement_timeout_s: further time for an order while no replica is left.
        restored: False for a coordinator that must be restored from a snapshot first.
    """

    def __init__(
        self,
        on_leave: Callable[[str], Awaitable[None]] | None = None,
        kill: Callable[[Any], None] | None = None,
        replacement_timeout_s: float = 0.0,
        restored: bool = True,
    ) -> None:
        self._on_leave, self._kill = on_leave, kill
        self._replacement_timeout_s = replacement_timeout_s
        self._restored = restored
        self._generation = 0
        self._last_number = 0
        self._last_version = -1
        self._ended_version = -1
        """Highest version whose publication has ended."""
        self._current: dict[str, Order] = {}
        """Newest order of each subject: executed by the replicas, or about to be."""
        self._completed: dict[str, Order] = {}
        """Newest order of each subject that all live replicas have executed."""
        self._quorum = Quorum(lambda: asyncio.get_running_loop().time())
        self._evicted: dict[str, str] = {}
        self._ever_subscribed = False
        """True once any replica has subscribed. If all die later, an order waits for the replacements that
        Serve starts."""
        self._pending: PendingOrder | None = None
        self._changed = BroadcastCondition()
        self._notices: set[asyncio.Task[None]] = set()

    # called by replicas

    async def wait_forever(self) -> None:
        """Never return.

        A replica owns the result of its call; awaiting that result raises as soon as the replica dies.
        """
        await asyncio.Event().wait()

    async def subscribe(
        self, replica: str, liveness_ref: list[Any] | None = None, handle: Any = None, returns: bool = False
    ) -> CatchUp:
        """Add a replica.

        It executes the returned orders, acknowledges each, and then acknowledges the returned number. A
        pending probe follows.

        Args:
            liveness_ref: one-element list holding the reference to the result of `wait_forever` that the
                replica owns.
            handle: handle of the replica's actor.
            returns: True for a replica that has been subscribed before; it receives transient orders too.

        Raises:
            ReplicaEvictedError: the replica was evicted.
        """
        await self._wait_until_restored()
        self._check_not_evicted(replica)
        self._ever_subscribed = True
        subscription = self._quorum.add(replica, handle)
        if liveness_ref:
            watch = self._watch_replica(replica, subscription, liveness_ref)
            subscription.liveness_task = asyncio.create_task(watch)
        self._notify()
        orders = [order for order in self._orders_after(0) if returns or order.kind not in TRANSIENT]
        probing = self._pending is not None and self._pending.order.kind == "probe" and not returns
        return CatchUp(self._last_number - probing, orders)

    async def next(self, replica: str, after: int, timeout: float) -> list[Order]:
        """Return the orders after number `after`; an empty list if there are none within `timeout` seconds.

        Raises:
            NotSubscribedError: the replica must subscribe first.
            ReplicaEvictedError: the replica was evicted.
        """
        await self.heartbeat(replica)
        await self._changed.wait_for(
            lambda: bool(self._orders_after(after)) or replica not in self._quorum, timeout
        )
        await self.heartbeat(replica)
        return self._orders_after(after)

    async def heartbeat(self, replica: str) -> None:
        """Record that a replica is alive while it executes an order.

        Raises:
            NotSubscribedError, ReplicaEvictedError: as for `next`.
        """
        self._check_not_evicted(replica)
        self._quorum.heard_from(replica)

    async def acknowledge(
        self, replica: str, number: int, failure: str | None = None, result: Any = None
    ) -> None:
        """Record that a replica has executed order `number`, or failed to.

        Args:
            failure: reason why the replica failed.

        Raises:
            NotSubscribedError, ReplicaEvictedError: as for `next`.
        """
        self._check_not_evicted(replica)
        subscription = self._quorum.heard_from(replica)
        subscription.acknowledged = max(subscription.acknowledged, number)
        pending = self._pending
        is_pending = pending is not None and pending.order.number == number
        if failure:
            logger.warning("engine replica %s failed to execute order %d: %s", replica, number, failure)
            subscription.failed = number
        if pending and is_pending:
            if failure:
                pending.failures[replica] = failure
            else:
                pending.results.setdefault(replica, result)
        elif failure:
            self._withdraw(number)
        self._update_completed()

    async def leave(self, replica: str) -> None:
        """Remove a replica that stops; unknown names are ignored."""
        await self._wait_until_restored()
        if self._quorum.remove(replica):
            self._update_completed()
            if self._on_leave is not None:
                await self._on_leave(replica)

    # execution of orders

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
        pending = self._pending = PendingOrder(order, clock())
        self._current[order.subject] = order
        if kind in TRANSIENT:  # the state that it undoes is no longer complete on all replicas
            self._completed.pop(order.subject, None)
        self._notify()
        try:
            await self._wait_for_replicas(pending, deadline)
            self._judge_failures(pending)
        finally:
            self._finish(pending)
        return {replica: pending.results.get(replica) for replica in self._quorum.executed(order.number)}

    async def _wait_for_replicas(self, pending: PendingOrder, deadline: float) -> None:
        """Wait for every replica's response, and evict late ones.

        Raises:
            WeightSyncError: no replica has executed the order in time.
        """
        order, clock, extended = pending.order, asyncio.get_running_loop().time, False
        timeout = order.timeout
        while not self._quorum.all_acknowledged(order.number):
            if not self._quorum and not extended:
                extended = True
                deadline += self._replacement_timeout_s
                timeout += self._replacement_timeout_s
                logger.warning("%s waits for a replacement of the engine replicas, which are gone", order)
            wake_at = min(deadline, self._quorum.next_lateness(order, pending.issued))
            seen = self._generation
            await self._changed.wait_for(lambda: self._generation != seen, wake_at - clock())  # noqa: B023
            for replica, reason in self._quorum.late(order, pending.issued).items():
                self._evict(replica, reason)
            if clock() >= deadline:
                self._end_waiting(pending, timeout)

    def _end_waiting(self, pending: PendingOrder, timeout: float) -> None:
        """Evict the replicas that are late at the end of an order's time.

        Raises:
            WeightSyncError: no replica has executed the order.
        """
        order = pending.order
        late = self._quorum.waiting(order.number)
        if not self._quorum.executed(order.number):
            gone = ", ".join(pending.evicted) or "a dead replica"
            missing = ", ".join(late) or f"a replacement for {gone}"
            raise WeightSyncError(f"{order} did not reach {missing} within {timeout:g} s")
        for replica in late:
            self._evict(replica, f"it had not executed {order} after {timeout:g} s")

    def _judge_failures(self, pending: PendingOrder) -> None:
        """Evict the replicas that failed an order which others have executed.

        Raises:
            WeightSyncError: all replicas failed.
        """
        number = pending.order.number
        failed = self._quorum.failed(number)
        if failed and not self._quorum.executed(number):
            self._withdraw(number)
            raise WeightSyncError("; ".join(f"{name}: {pending.failures[name]}" for name in failed))
        for replica in failed:
            self._evict(replica, pending.failures[replica])

    def _finish(self, pending: PendingOrder) -> None:
        if pending.order.kind == "probe":  # a late result would have no reader
            self._current.pop("probe", None)
        self._pending = None
        self._update_completed()

    # restarts

    def snapshot(self) -> Snapshot:
        """Return the state from which a restarted coordinator can continue."""
        current = dict(self._current)
        if self._pending and current.get(subject := self._pending.order.subject) is self._pending.order:
            del current[subject]
            if completed := self._completed.get(subject):
                current[subject] = completed
        return Snapshot(
            self._generation,
            self._last_number,
            self._ended_version,
            current,
            dict(self._completed),
            self._quorum.handles(),
            dict(self._evicted),
            self._ever_subscribed,
        )

    async def next_snapshot(self, after: int, timeout: float) -> Snapshot | None:
        """Wait up to `timeout` seconds for a state of a generation other than `after`; return the state.

        Returns:
            None if the coordinator has been restarted and must be restored.
        """
        await self._changed.wait_for(lambda: not self._restored or self._generation != after, timeout)
        return self.snapshot() if self._restored else None

    async def restore(self, snapshot: Snapshot) -> None:
        """Continue from a snapshot after a restart; without effect if the coordinator was not restarted."""
        if self._restored:
            return
        self._generation = snapshot.generation
        self._last_number = snapshot.number
        self._last_version = self._ended_version = snapshot.version
        self._current, self._completed = dict(snapshot.current), dict(snapshot.completed)
        self._evicted = dict(snapshot.evicted)
        self._ever_subscribed = snapshot.ever_subscribed
        for replica, handle in snapshot.replicas.items():
            subscription = self._quorum.add(replica, handle, present=False)
            waiting = self._watch_return(replica, subscription)
            subscription.liveness_task = asyncio.create_task(waiting)
        self._restored = True
        self._notify()

    async def _wait_until_restored(self) -> None:
        await self._changed.wait_for(lambda: self._restored)

    async def _watch_return(self, replica: str, subscription: Subscription) -> None:
        """Evict a replica that does not subscribe again after a restart of the coordinator."""
        await self._changed.wait_for(
            lambda: not self._quorum.is_current(replica, subscription), RETURN_TIMEOUT_S
        )
        if self._quorum.is_current(replica, subscription):
            self._evict(
                replica, f"it did not return within {RETURN_TIMEOUT_S:g} s of the coordinator's restart"
            )

    # bookkeeping

    def _notify(self) -> None:
        self._generation += 1
        self._changed.notify_all()

    def _check_not_evicted(self, replica: str) -> None:
        if reason := self._evicted.get(replica):
            raise ReplicaEvictedError(f"replica {replica} was evicted: {reason}. It must be replaced")

    def _evict(self, replica: str, reason: str) -> None:
        """Remove a replica from the quorum and kill it; Serve starts its replacement."""
        subscription = self._quorum.remove(replica)
        if subscription is None:
            return
        self._evicted[replica] = reason
        if self._pending:
            self._pending.evicted.append(f"{replica} ({reason})")
        logger.error("engine replica %s is evicted and killed: %s", replica, reason)
        if self._kill is not None and subscription.handle is not None:
            self._kill(subscription.handle)
        self._update_completed()
        if self._on_leave is not None:
            notice = asyncio.ensure_future(self._on_leave(replica))
            self._notices.add(notice)
            notice.add_done_callback(self._notices.discard)

    def _orders_after(self, number: int) -> list[Order]:
        return sorted(
            (order for order in self._current.values() if order.number > number),
            key=lambda order: order.number,
        )

    def _update_completed(self) -> None:
        """Record the orders that all live replicas have executed by now."""
        for subject, order in list(self._current.items()):
            if not self._quorum.all_executed(order.number):
                continue
            if order.kind in TRANSIENT:
                if not (self._pending and self._pending.order is order):  # a joining replica still gets it
                    del self._current[subject]
            else:
                self._completed[subject] = order
        self._notify()

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
        if self._quorum.is_current(replica, subscription):
            self._quorum.remove(replica)
            self._update_completed()
        if self._on_leave is not None:
            await self._on_leave(replica)
