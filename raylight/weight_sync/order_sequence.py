"""The sequence of orders: its replicas execute one order after the other. See `coordinator` for the laws."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from raylight.errors import WeightSyncError
from raylight.weight_sync.membership import Membership, PendingOrder
from raylight.weight_sync.orders import TRANSIENT, Kind, Order

logger = logging.getLogger(__name__)


class OrderSequence(Membership):
    """State machine of orders, and of the replicas that have executed them."""

    # called by replicas

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
                if pending.order.kind == "weights":
                    self._received_version = max(self._received_version, pending.order.version)
        elif failure:
            self._withdraw(number)
        if not failure and number >= subscription.lacks:
            subscription.lacks = 0
        self._update_completed()

    # execution of orders

    async def _execute(self, kind: Kind, timeout: float, token: str = "", **fields: Any) -> dict[str, Any]:
        """Issue an order after all earlier ones, and wait until every replica has executed it.

        Args:
            token: identifies a publication for its sender.

        Returns:
            The replicas' results.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout
        if not await self._wait_for_turn(timeout):
            reason = f"{self._pending.order} is still under way" if self._pending else "others were before it"
            raise WeightSyncError(f"the {kind} order could not begin within {timeout:g} s: {reason}")
        self._last_number += 1
        order = Order(self._last_number, kind, timeout, **fields)
        pending = self._pending = PendingOrder(order, clock(), deadline, token)
        if kind == "weights":  # replicas that joined receive these instead of the earlier ones
            for subscription in self._quorum.lacking().values():
                subscription.lacks = 0
        self._current[order.subject] = order
        if kind in TRANSIENT:  # the state that it undoes is no longer complete on all replicas
            self._completed.pop(order.subject, None)
        self._notify()
        try:
            await self._wait_for_replicas(pending)
        except BaseException:
            if kind == "weights":  # they travel only while the order is pending
                self._withdraw(order.number)
            raise
        finally:
            self._finish(pending)
        return {replica: pending.results.get(replica) for replica in self._quorum.executed(order.number)}

    async def _wait_for_turn(self, timeout: float) -> bool:
        """Wait until all earlier orders have ended; False if they have not within `timeout` seconds."""
        turn = object()
        self._turns.append(turn)
        try:
            return await self._changed.wait_for(
                lambda: self._pending is None and self._turns[0] is turn, timeout
            )
        finally:
            self._turns.remove(turn)

    async def _wait_for_replicas(self, pending: PendingOrder) -> None:
        """Wait for every replica's response, and evict late ones. While too few are left, wait longer, once.

        Raises:
            WeightSyncError: no replica has executed the order in time.
        """
        order, clock = pending.order, asyncio.get_running_loop().time
        needed = self._min_replicas if order.kind in ("weights", "adapter") else 1
        while not self._has_reached(pending, needed):
            if len(self._quorum) < needed and "replacement" not in pending.extensions:
                pending.extend("replacement", pending.deadline + self._replacement_timeout_s)
                logger.warning("%s waits for a replacement of the engine replicas, which are gone", order)
            wake_at = min(pending.deadline, self._quorum.next_lateness(order, pending.issued))
            seen = self._generation
            await self._changed.wait_for(lambda: self._generation != seen, wake_at - clock())  # noqa: B023
            for replica, reason in self._quorum.late(order, pending.issued).items():
                self._evict(replica, reason)
            can_extend = len(self._quorum) < needed and "replacement" not in pending.extensions
            if pending.sender_failure or (clock() >= pending.deadline and not can_extend):
                self._end_waiting(pending, needed)

    def _has_reached(self, pending: PendingOrder, needed: int) -> bool:
        """Return True if all replicas have executed an order, and these are enough. Failed ones are evicted.

        Raises:
            WeightSyncError: all replicas failed.
        """
        if self._quorum.all_acknowledged(pending.order.number):
            self._judge_failures(pending)
        return self._quorum.all_executed(pending.order.number) and len(self._quorum) >= needed

    def _end_waiting(self, pending: PendingOrder, needed: int) -> None:
        """Evict the replicas that are late at the end of an order's time, or when the sender has failed.

        Raises:
            WeightSyncError: not enough replicas have executed the order.
        """
        order, seconds = pending.order, round(pending.seconds, 2)
        late, executed = self._quorum.waiting(order.number), self._quorum.executed(order.number)
        if not executed and pending.sender_failure:
            raise WeightSyncError(f"{order} was not sent: {pending.sender_failure}")
        gone = ", ".join(pending.evicted) or "a dead replica"
        missing = ", ".join(late) or f"a replacement for {gone}"
        if not executed:
            raise WeightSyncError(f"{order} did not reach {missing} within {seconds:g} s")
        for replica in late:
            reason = pending.sender_failure or f"it had not executed {order} after {seconds:g} s"
            self._evict(replica, reason)
        if len(executed) < needed:
            raise WeightSyncError(
                f"{order} reached {len(executed)} replicas within {seconds:g} s, and engine.min_replicas is "
                f"{needed}: it did not reach {missing}. See why replicas end with `ray logs`, or lower "
                "engine.min_replicas"
            )

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
        if pending.token:
            self._ended_tokens.append(pending.token)
        self._update_completed()

    def _update_completed(self) -> None:
        """Record the orders that all live replicas have executed by now."""
        for subject, order in list(self._current.items()):
            if not self._quorum.all_executed(order.number):
                continue
            if order.kind in TRANSIENT:  # replicas that were joining when it was issued still get it
                is_pending = self._pending is not None and self._pending.order is order
                if not is_pending and self._quorum.all_responded(order.number):
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
