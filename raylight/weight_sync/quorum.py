"""The live replicas: how far each is with the orders, and when it is too late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from raylight.errors import NotSubscribedError
from raylight.weight_sync.orders import Order

SILENCE_SHARE = 0.25
"""Share of an order's timeout after which a replica that sends nothing counts as frozen."""
MIN_SILENCE_S = 10.0
"""Shortest silence that counts as frozen: a replica on a busy machine sends its heartbeats late."""
LATE_SHARE = 0.75
"""Share of an order's timeout that a replica has for executing the order."""


@dataclass
class Subscription:
    """A live replica's progress."""

    since: float
    """Time at which it subscribed."""
    handle: Any = None
    """Handle of the replica's actor, through which it is killed."""
    heard: float = 0.0
    """Time of its last call."""
    present: bool = True
    """False: known from before a restart of the coordinator, and not yet subscribed again."""
    acknowledged: int = -1
    """Number of the last acknowledged order; -1 until the replica has caught up."""
    failed: int = -1
    """Number of the last order that it failed to execute."""
    lacks: int = 0
    """Number of the order of weights that it must execute before it counts; 0 if it counts."""
    received: int = 0
    """Version of the last weights that it received; the acknowledgement of their order may follow."""
    workers: int = 1
    """Number of its processes that receive weights."""
    node: str = ""
    """Network address of its node."""
    liveness_task: asyncio.Task[None] | None = None
    """Waits for the replica's death, or for its return after a restart of the coordinator."""

    def has_executed(self, number: int) -> bool:
        return self.acknowledged >= number and self.failed != number


class Quorum:
    """The replicas that an order waits for.

    A replica that lacks the current weights counts as soon as it has received them: until then it cannot
    execute later orders, and it does not serve.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._replicas: dict[str, Subscription] = {}

    def __len__(self) -> int:
        """Return the number of replicas that count."""
        return len(self._counted())

    def _counted(self) -> dict[str, Subscription]:
        return {name: s for name, s in self._replicas.items() if not s.lacks}

    def lacking(self) -> dict[str, Subscription]:
        """Return the replicas that wait for the current weights."""
        return {name: s for name, s in self._replicas.items() if s.lacks and s.failed != s.lacks}

    def find(self, replica: str) -> Subscription | None:
        """Return a replica's subscription."""
        return self._replicas.get(replica)

    def __contains__(self, replica: str) -> bool:
        return replica in self._replicas

    def __iter__(self) -> Iterator[str]:
        return iter(self._replicas)

    def handles(self) -> dict[str, Any]:
        return {replica: subscription.handle for replica, subscription in self._replicas.items()}

    def is_current(self, replica: str, subscription: Subscription) -> bool:
        """Return True if the replica has neither left nor subscribed again."""
        return self._replicas.get(replica) is subscription

    def add(self, replica: str, handle: Any, present: bool = True) -> Subscription:
        """Add a replica, in place of its earlier subscription if it has one."""
        self.remove(replica)
        now = self._clock()
        subscription = Subscription(now, handle, heard=now, present=present)
        self._replicas[replica] = subscription
        return subscription

    def remove(self, replica: str) -> Subscription | None:
        subscription = self._replicas.pop(replica, None)
        task = subscription.liveness_task if subscription else None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        return subscription

    def heard_from(self, replica: str) -> Subscription:
        """Record a call of a replica; return its subscription.

        Raises:
            NotSubscribedError: the replica must subscribe first.
        """
        subscription = self._replicas.get(replica)
        if subscription is None or not subscription.present:
            raise NotSubscribedError(f"replica {replica} is not subscribed; it must subscribe again")
        subscription.heard = self._clock()
        return subscription

    # progress

    def caught_up(self) -> int:
        """Return the number of replicas that have caught up."""
        return sum(subscription.acknowledged >= 0 for subscription in self._counted().values())

    def all_executed(self, number: int) -> bool:
        return bool(len(self)) and all(s.has_executed(number) for s in self._counted().values())

    def all_acknowledged(self, number: int) -> bool:
        """Return True if no response to an order is missing."""
        return bool(len(self)) and not self.waiting(number)

    def waiting(self, number: int) -> list[str]:
        """Return the replicas that have neither executed nor failed an order."""
        return sorted(name for name, s in self._counted().items() if s.acknowledged < number)

    def all_responded(self, number: int) -> bool:
        """Return True if no response to an order is missing, also of replicas that do not count yet."""
        return all(subscription.acknowledged >= number for subscription in self._replicas.values())

    def failed(self, number: int) -> list[str]:
        return sorted(name for name, s in self._counted().items() if s.failed == number)

    def executed(self, number: int) -> list[str]:
        return [name for name, s in self._counted().items() if s.has_executed(number)]

    # lateness

    def next_lateness(self, order: Order, issued: float) -> float:
        """Return the earliest time at which a replica may become late for an order."""
        times = [
            time
            for name in self.waiting(order.number)
            for time, _ in self._limits(self._replicas[name], order, issued)
        ]
        return min(times, default=float("inf"))

    def late(self, order: Order, issued: float) -> dict[str, str]:
        """Return the replicas that are too late for an order, with the reasons.

        A frozen process sends nothing, and is noticed early. A replica that still sends heartbeats may have a
        slow network or a large model, and gets most of the time.
        """
        now = self._clock()
        late = {}
        for name in self.waiting(order.number):
            for time, reason in self._limits(self._replicas[name], order, issued):
                if now >= time:
                    late[name] = reason
                    break
        return late

    def _limits(
        self, subscription: Subscription, order: Order, issued: float
    ) -> tuple[tuple[float, str], ...]:
        began = max(issued, subscription.since)
        silence, total = silence_limit(order.timeout), LATE_SHARE * order.timeout
        silent = (
            max(began, subscription.heard) + silence,
            f"it sent nothing for {silence:g} s during {order}",
        )
        if order.kind == "weights":  # it may wait for the sender, see `transfers`
            return (silent,)
        return silent, (began + total, f"it had not executed {order} after {total:g} s")


def silence_limit(timeout: float) -> float:
    """Return the time after which a replica that sends nothing counts as frozen, during an order or a phase
    with this timeout."""
    return min(max(SILENCE_SHARE * timeout, MIN_SILENCE_S), LATE_SHARE * timeout)
