"""Where orders meet the replicas: weights, adapters, sleep and probes reach all of them, in one sequence.

Replicas subscribe and long-poll; the trainer gives orders, one at a time. Laws:

- An order's method returns only when every live replica has acknowledged it, and `versions` changes only then.
- Versions of weights and adapters are from one increasing sequence, and never reused, not even after a failure.
- A replica's failure, or the end of the time, fails the order and names the replica. What failed is withdrawn: who joins later
  gets what all had before it. What merely ran out of time stands: it settles when the late ones acknowledge it, or is superseded.
- Who joins gets all that stands in one answer, and counts as live from then on; who died is waited for no longer.
- Of superseded boxes nothing is kept.

Arrays travel through Ray's object store: replicas on the publisher's node map the same shared memory, each other node gets a copy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError

from raylight.aio import BroadcastCondition
from raylight.engines.protocol import UpdateMode
from raylight.errors import EngineStartError, WeightSyncError
from raylight.store.client import StoreClient
from raylight.weight_sync.orders import PASSING, Kind, Order, State, Versions

logger = logging.getLogger(__name__)

COORDINATOR_NAME = "board"
POLL_TIMEOUT_S = 30.0
"""How long a replica's poll waits for an order."""


@dataclass
class Member:
    """A live replica."""

    number: int = -1
    """The last order that it has acknowledged; -1 until it has caught up."""
    liveness_task: asyncio.Task[None] | None = None
    """Waits for its death."""


@dataclass
class Open:
    """The order that its publisher waits for."""

    order: Order
    results: dict[str, Any] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


class ReplicaCoordinator:
    """Who has carried out what.

    Args:
        on_leave: is told the name of each replica that left or died.
    """

    def __init__(self, on_leave: Callable[[str], Awaitable[None]] | None = None) -> None:
        self._on_leave = on_leave
        self._number = 0
        self._version = 0
        self._standing: dict[str, Order] = {}
        """By subject: what replicas are to carry out, or have."""
        self._settled: dict[str, Order] = {}
        """By subject: what all have."""
        self._members: dict[str, Member] = {}
        self._joined = False
        """Whether there ever was a replica. If all died, an order waits for those that Serve starts in their place."""
        self._open: Open | None = None
        self._broken: str | None = None
        self._changed = BroadcastCondition()

    # the replicas' side

    async def stay(self) -> None:
        """Never returns. The replica owns this call's result, and when it dies whoever waits for the result is told at once."""
        await asyncio.Event().wait()

    async def subscribe(self, replica: str, lifeline: list[Any] | None = None) -> State:
        """Join. The replica carries out what it is given, acknowledges each order, and then the state's number.

        Args:
            lifeline: holds the reference to a result of `stay` that the replica owns.
        """
        self._joined = True
        member = self._members[replica] = Member()
        if lifeline:
            member.liveness_task = asyncio.create_task(self._watch_replica(replica, member, lifeline))
        self._changed.notify_all()
        standing = [order for order in self._after(0) if order.kind not in PASSING]
        return State(self._number, standing)

    async def next(self, replica: str, after: int, timeout: float) -> list[Order]:
        """The orders after the one of this number, as soon as there are any; none after `timeout` seconds.

        Raises:
            WeightSyncError: the replica has not subscribed.
        """
        self._member(replica)
        await self._changed.wait_for(
            lambda: bool(self._after(after)) or replica not in self._members, timeout
        )
        return self._after(after)

    async def acknowledge(
        self, replica: str, number: int, failure: str | None = None, result: Any = None
    ) -> None:
        """A replica has carried out an order, or failed to.

        Raises:
            WeightSyncError: the replica has not subscribed.
        """
        member = self._member(replica)
        member.number = max(member.number, number)
        if failure:
            logger.warning("engine replica %s failed at order %d: %s", replica, number, failure)
            self._withdraw(number)
        if self._open and self._open.order.number == number:
            if failure:
                self._open.failures[replica] = failure
            else:
                self._open.results.setdefault(replica, result)
        self._settle()

    async def leave(self, replica: str) -> None:
        """A replica stops; unknown ones are ignored."""
        if member := self._members.pop(replica, None):
            if member.liveness_task:
                member.liveness_task.cancel()
            self._settle()
            if self._on_leave is not None:
                await self._on_leave(replica)

    async def cannot_start(self, why: str) -> None:
        """A replica failed before it could subscribe."""
        self._broken = why
        self._changed.notify_all()

    # the trainer's side

    async def wait_for_subscribers(self, count: int) -> None:
        """Wait until so many replicas have caught up.

        Raises:
            EngineStartError: one of them cannot start.
        """
        await self._changed.wait_for(
            lambda: bool(self._broken) or sum(m.number >= 0 for m in self._members.values()) >= count
        )
        if self._broken:
            raise EngineStartError(f"an engine replica failed to start: {self._broken}")

    async def versions(self) -> Versions:
        """What all replicas have."""
        sleep = self._settled.get("sleep")
        adapters = {o.adapter: o.version for o in self._settled.values() if o.kind == "adapter" and o.adapter}
        weights = self._settled.get("weights")
        return Versions(weights.version if weights else 0, adapters, sleep.level if sleep else None)

    async def publish(
        self,
        version: int,
        box: list[Any],
        timeout: float,
        mode: UpdateMode = "keep",
        adapter: str | None = None,
    ) -> int:
        """Give new weights, or an adapter of this name, to all replicas; returns how many took them, once all have.

        Raises:
            WeightSyncError: the version is not new, nobody subscribes, the replicas sleep, one failed, or time ran out.
        """
        if version <= self._version:
            raise WeightSyncError(
                f"version {version} is not newer than {self._version}; versions are never reused"
            )
        self._must_be_ready(awake_for=f"version {version} is published")
        self._version = version
        kind: Kind = "weights" if adapter is None else "adapter"
        await self._give(kind, timeout, version=version, box=box, mode=mode, adapter=adapter)
        return len(self._members)

    async def drop_adapter(self, name: str, timeout: float) -> None:
        """Have no replica serve the adapter any more; one that none serves is ignored.

        Raises:
            WeightSyncError: as for `publish`.
        """
        self._must_be_ready(awake_for=f"adapter {name!r} is dropped")
        await self._give("drop_adapter", timeout, adapter=name)

    async def sleep(self, timeout: float, level: int = 1) -> dict[str, str | None]:
        """Have all engines free their device's memory; returns by replica why nothing was freed, or None where it was.

        Raises:
            WeightSyncError: nobody subscribes, the level is not 1, a replica failed, or time ran out.
        """
        if level != 1:
            raise WeightSyncError(
                f"sleep has no level {level} here: level 2 forgets the weights, and requests that waited would be sampled from "
                "nothing before they come again; use level 1"
            )
        self._must_be_ready()
        return await self._give("sleep", timeout, level=level)

    async def wake(self, timeout: float) -> None:
        """Have all engines go on.

        Raises:
            WeightSyncError: as for `sleep`.
        """
        self._must_be_ready()
        await self._give("wake", timeout)

    async def probe(
        self, ids: list[int], timeout: float, adapter: str | None = None
    ) -> dict[str, list[float]]:
        """Every replica's log-probs of `ids[1:]` at temperature 1.

        Raises:
            WeightSyncError: as for `publish`, or a replica's engine cannot tell.
        """
        self._must_be_ready(awake_for="it is probed")
        results = await self._give("probe", timeout, ids=tuple(ids), adapter=adapter)
        found = {
            replica: result for replica, result in results.items() if result is not None
        }  # None: it just joined
        if not found:
            raise WeightSyncError(
                "no engine replica answered the probe: all were replaced meanwhile; probe again"
            )
        return found

    def _must_be_ready(self, awake_for: str | None = None) -> None:
        if not self._joined:
            raise WeightSyncError(
                "no engine replica has subscribed to weights; is the serving deployment up?"
            )
        sleep = self._standing.get("sleep")
        if awake_for and sleep and sleep.kind == "sleep":
            raise WeightSyncError(f"the engines sleep; wake them before {awake_for}")

    async def _give(self, kind: Kind, timeout: float, **what: Any) -> dict[str, Any]:
        """Have every replica carry out an order, after those given before; returns the replicas' results."""
        clock = asyncio.get_running_loop().time
        end = clock() + timeout
        if not await self._changed.wait_for(lambda: self._open is None, timeout):
            before = f"{self._open.order} is still under way" if self._open else "others were before it"
            raise WeightSyncError(f"the {kind} order could not begin within {timeout:g} s: {before}")
        self._number += 1
        order = Order(self._number, kind, timeout, **what)
        opened = self._open = Open(order)
        self._standing[order.subject] = order
        if kind in PASSING:  # from now on, not all have what it undoes
            self._settled.pop(order.subject, None)
        self._changed.notify_all()
        try:
            done = await self._changed.wait_for(
                lambda: bool(opened.failures) or self._all_have(order), end - clock()
            )
        finally:
            self._close(opened)
        if opened.failures:
            raise WeightSyncError("; ".join(f"{replica}: {why}" for replica, why in opened.failures.items()))
        if not done:
            late = sorted(r for r, m in self._members.items() if m.number < order.number) or [
                "a replica in place of the dead"
            ]
            raise WeightSyncError(f"{order} did not reach {', '.join(late)} within {timeout:g} s")
        return opened.results

    def _close(self, opened: Open) -> None:
        if opened.order.kind == "probe":  # nobody wants to know later
            self._standing.pop("probe", None)
        self._open = None
        self._changed.notify_all()

    # bookkeeping

    def _member(self, replica: str) -> Member:
        if replica not in self._members:
            raise WeightSyncError(
                f"replica {replica} is not subscribed: it left, or was taken for dead. It must start again"
            )
        return self._members[replica]

    def _after(self, number: int) -> list[Order]:
        return sorted(
            (order for order in self._standing.values() if order.number > number),
            key=lambda order: order.number,
        )

    def _all_have(self, order: Order) -> bool:
        return bool(self._members) and all(member.number >= order.number for member in self._members.values())

    def _settle(self) -> None:
        """Note what all have by now."""
        for subject, order in list(self._standing.items()):
            if not self._all_have(order):
                continue
            if order.kind in PASSING:
                del self._standing[subject]
            else:
                self._settled[subject] = order
        self._changed.notify_all()

    def _withdraw(self, number: int) -> None:
        """Let an order that failed stand no longer: what all had before it does, if anything."""
        for subject, order in list(self._standing.items()):
            if order.number == number:
                del self._standing[subject]
                if before := self._settled.get(subject):
                    self._standing[subject] = before

    async def _watch_replica(self, replica: str, member: Member, lifeline: list[Any]) -> None:
        """Wait no longer for a replica once it died; Serve starts another, which subscribes anew."""
        try:
            await lifeline[0]
        except RayError as error:
            logger.warning("engine replica %s died: %s", replica, type(error).__name__)
        if self._members.get(replica) is member:
            del self._members[replica]
            self._settle()
        if self._on_leave is not None:
            await self._on_leave(replica)


class CoordinatorActor(ReplicaCoordinator):
    """The board as a Ray actor.

    Args:
        store: is told of replicas that are gone, so that it waits for none of their records.
    """

    def __init__(self, store: StoreClient | None) -> None:
        super().__init__(store.lose_recorder if store is not None else None)


def start_coordinator(namespace: str, store: StoreClient | None = None) -> Any:
    """Start the board of an application's replicas and return its actor handle."""
    return (
        ray.remote(CoordinatorActor)
        .options(name=COORDINATOR_NAME, namespace=namespace, num_cpus=0, max_concurrency=1000)
        .remote(store)
    )
