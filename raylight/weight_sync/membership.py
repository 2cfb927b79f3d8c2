"""The replicas of a coordinator: they join, are watched, leave and are evicted.

A restarted coordinator continues with them. See `coordinator` for the laws.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError

from raylight._utils.aio import BroadcastCondition
from raylight.errors import ReplicaEvictedError
from raylight.weight_sync.orders import TRANSIENT, CatchUp, Order, Snapshot
from raylight.weight_sync.quorum import Quorum, Subscription

logger = logging.getLogger(__name__)

RETURN_TIMEOUT_S = 60.0
"""Time that replicas have for subscribing again after a restart of the coordinator."""
REMEMBERED_TOKENS = 16
"""Number of ended publications that are remembered for their senders."""


@dataclass
class PendingOrder:
    """The order whose publisher is waiting, with the replicas' responses."""

    order: Order
    issued: float
    deadline: float
    token: str = ""
    """Identifies the publication for its sender."""
    sender_failure: str = ""
    """Reason why the sender of weights failed."""
    extensions: set[str] = field(default_factory=set)
    """Reasons for which the deadline was extended, each once."""
    evicted: list[str] = field(default_factory=list)
    """Replicas that were evicted meanwhile, with the reasons."""
    results: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Time that the replicas have in all."""
        return self.deadline - self.issued

    def extend(self, reason: str, deadline: float) -> None:
        """Move the deadline, unless it was moved for this reason before."""
        if reason not in self.extensions:
            self.extensions.add(reason)
            self.deadline = max(self.deadline, deadline)


class Membership:
    """State machine of the replicas that execute orders, and of its own restarts.

    Args:
        on_leave: called with the name of each replica that left, died or was evicted.
        kill: called with the handle of each evicted replica's actor.
        replacement_timeout_s: further time for an order while no replica is left.
        restored: False for a coordinator that must be restored from a snapshot first.
        min_replicas: number of replicas that must receive new weights, or a new adapter.
    """

    def __init__(
        self,
        on_leave: Callable[[str], Awaitable[None]] | None = None,
        kill: Callable[[Any], None] | None = None,
        replacement_timeout_s: float = 0.0,
        restored: bool = True,
        min_replicas: int = 1,
    ) -> None:
        self._on_leave, self._kill = on_leave, kill
        self._replacement_timeout_s = replacement_timeout_s
        self._restored = restored
        self._min_replicas = min_replicas
        self._generation = 0
        self._last_number = 0
        self._last_version = -1
        self._ended_version = -1
        """Highest version whose publication has ended."""
        self._received_version = 0
        """Highest version of the weights that any replica has received."""
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
        self._turns: list[object] = []
        """Orders that wait until the earlier ones have ended."""
        self._ended_tokens: collections.deque[str] = collections.deque(maxlen=REMEMBERED_TOKENS)
        """Tokens of publications that have ended."""
        self._changed = BroadcastCondition()
        self._notices: set[asyncio.Task[None]] = set()

    # called by replicas

    async def wait_forever(self) -> None:
        """Never return.

        A replica owns the result of its call; awaiting that result raises as soon as the replica dies.
        """
        await asyncio.Event().wait()

    async def subscribe(
        self,
        replica: str,
        liveness_ref: list[Any] | None = None,
        handle: Any = None,
        returns: bool = False,
        held: int = 0,
        workers: int = 1,
        node: str = "",
    ) -> CatchUp:
        """Add a replica.

        It executes the returned orders, acknowledges each, and then acknowledges the returned number. A
        pending probe follows. A replica that lacks the current weights receives them by a transfer, and
        counts from then on.

        Args:
            liveness_ref: one-element list holding the reference to the result of `wait_forever` that the
                replica owns.
            handle: handle of the replica's actor.
            returns: True for a replica that has been subscribed before; it receives transient orders too.
            held: version of the weights that it holds.
            workers: number of its processes that receive weights.
            node: network address of its node.

        Raises:
            ReplicaEvictedError: the replica was evicted.
        """
        await self._wait_until_restored()
        self._check_not_evicted(replica)
        self._ever_subscribed = True
        subscription = self._quorum.add(replica, handle)
        subscription.workers, subscription.node, subscription.received = workers, node, held
        self._received_version = max(self._received_version, held)
        weights = self._completed.get("weights")
        is_pending = self._pending is not None and self._pending.order.kind == "weights"
        if weights is not None and held < weights.version and not is_pending:
            subscription.lacks = weights.number
        if liveness_ref:
            watch = self._watch_replica(replica, subscription, liveness_ref)
            subscription.liveness_task = asyncio.create_task(watch)
        self._notify()
        orders = [order for order in self._orders_after(0) if returns or order.kind not in TRANSIENT]
        probing = self._pending is not None and self._pending.order.kind == "probe" and not returns
        return CatchUp(self._last_number - probing, orders)

    async def heartbeat(self, replica: str) -> None:
        """Record that a replica is alive while it executes an order.

        Raises:
            NotSubscribedError, ReplicaEvictedError: as for `next`.
        """
        self._check_not_evicted(replica)
        self._quorum.heard_from(replica)

    async def leave(self, replica: str) -> None:
        """Remove a replica that stops; unknown names are ignored."""
        await self._wait_until_restored()
        if self._quorum.remove(replica):
            self._update_completed()
            if self._on_leave is not None:
                await self._on_leave(replica)

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
            frozenset(self._quorum.lacking()),
            self._received_version,
            tuple(self._ended_tokens),
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
        self._received_version = max(self._received_version, snapshot.received)
        self._ended_tokens.extend(snapshot.ended_tokens)
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
        raise NotImplementedError

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
