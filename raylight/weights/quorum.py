"""Replicas of a coordinator that are alive, with their current order and weight transfer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ray.exceptions import RayError

from raylight._utils.aio import pause
from raylight.errors import NotSubscribedError, ReplicaEvictedError, WeightSyncError
from raylight.weights.orders import FINAL, BoxedRef, Order, Phase, ReplicaState
from raylight.weights.protocol import EngineLoad

logger = logging.getLogger(__name__)

RETURN_TIMEOUT_S = 60.0
"""Time that replicas have for subscribing again after a restart of the coordinator."""
SILENCE_SHARE = 0.25
"""Share of an order's timeout after which a replica that sends nothing counts as frozen."""
MIN_SILENCE_S = 10.0
"""Shortest silence that counts as frozen: a replica on a busy machine sends its reports late."""
LATE_SHARE = 0.75
"""Share of an order's timeout that a replica has for executing the order."""
LAST_EVICTION_SHARE = 0.95
"""Share of an order's time after which members of a transfer that hang are evicted."""


@dataclass
class Replica:
    """A live replica.

    Attributes:
        since: time at which it subscribed.
        handle: handle of its actor, through which it is killed.
        heard: time of its last call.
        present: False: known from before a restart of the coordinator, and not yet subscribed again.
        workers: number of its processes that receive weights.
        node: network address of its node.
        state: as it reported it last.
        failed: number of the last order that it failed.
        load, load_round: load of its engine, and the round of reports in which it came.
        watch: waits for its death, or for its return after a restart of the coordinator.
    """

    since: float
    handle: object = None
    heard: float = 0.0
    present: bool = True
    workers: int = 1
    node: str = ""
    state: ReplicaState = field(default_factory=ReplicaState)
    failed: int = -1
    load: EngineLoad | None = None
    load_round: int = -1
    watch: asyncio.Task[None] | None = None

    def has_reached(self, order: Order) -> bool:
        return self.present and order.is_reached(self.state)

    def silent_at(self, began: float, timeout: float, subject: str) -> tuple[float, str]:
        """Return the time at which it counts as frozen if it sends nothing, and the reason.

        Args:
            began: start of an order or a phase.
            timeout: time that the order has.
        """
        silence = min(max(SILENCE_SHARE * timeout, MIN_SILENCE_S), LATE_SHARE * timeout)
        return max(began, self.heard) + silence, f"it sent nothing for {silence:g} s during {subject}"


class Quorum(dict[str, Replica]):
    """The live replicas by name, of which all must reach an order that count.

    A replica that lacks the current weights counts as soon as it has received them: until then it cannot
    execute later orders, and it does not serve. One that dies, leaves or is evicted is waited for no longer.

    Args:
        on_leave: called with the name of each replica that left, died or was evicted.
        kill: called with the handle of each evicted replica's actor.
        on_change: called when a replica is gone.
    """

    def __init__(
        self,
        on_leave: Callable[[str], Awaitable[None]] | None,
        kill: Callable[[Any], None] | None,
        on_change: Callable[[], None],
    ) -> None:
        super().__init__()
        self._on_leave, self._kill, self._on_change = on_leave, kill, on_change
        self._notices: set[asyncio.Task[None]] = set()
        self.standing: Order | None = None
        """Current weights, which a joining replica must receive; None if there are none, or newer ones are
        being published, which all receive."""
        self.evicted: dict[str, str] = {}
        """Evicted replicas with the reasons."""
        self.ever_subscribed = False
        """True once any replica has subscribed. If all die later, an order waits for the replacements that
        Serve starts."""

    def add(self, name: str, replica: Replica, liveness_ref: BoxedRef | None) -> None:
        """Add a replica, in place of its earlier subscription if it has one.

        Args:
            liveness_ref: see `ReplicaCoordinator.subscribe`.

        Raises:
            ReplicaEvictedError: the replica was evicted.
        """
        self._check_not_evicted(name)
        self.remove(name)
        self[name], self.ever_subscribed = replica, True
        if liveness_ref:
            replica.watch = asyncio.create_task(self._watch_life(name, replica, liveness_ref))

    def expect(self, name: str, replica: Replica) -> None:
        """Add a replica that is to subscribe again after a restart of the coordinator."""
        self[name] = replica
        replica.watch = asyncio.create_task(self._watch_return(name, replica))

    def find(self, name: str) -> Replica:
        """Return a replica that calls.

        Raises:
            NotSubscribedError: the replica must subscribe first.
            ReplicaEvictedError: the replica was evicted.
        """
        self._check_not_evicted(name)
        replica = self.get(name)
        if replica is None or not replica.present:
            raise NotSubscribedError(f"replica {name} is not subscribed; it must subscribe again")
        return replica

    async def leave(self, name: str) -> None:
        """Remove a replica that stops; unknown names are ignored."""
        if self.remove(name):
            self._on_change()
            if self._on_leave is not None:
                await self._on_leave(name)

    def evict(self, name: str, reason: str) -> None:
        """Remove and kill a replica; Serve starts its replacement."""
        replica = self.remove(name)
        if replica is None:
            return
        self.evicted[name] = reason
        logger.error("engine replica %s is evicted and killed: %s", name, reason)
        if self._kill is not None and replica.handle is not None:
            self._kill(replica.handle)
        self._on_change()
        if self._on_leave is not None:
            notice = asyncio.ensure_future(self._on_leave(name))
            self._notices.add(notice)  # the event loop keeps only a weak reference
            notice.add_done_callback(self._notices.discard)

    def remove(self, name: str) -> Replica | None:
        """Remove and return a replica, and end its watch; unknown names are ignored."""
        replica = self.pop(name, None)
        watch = replica.watch if replica else None
        if watch is not None and watch is not asyncio.current_task():  # a watch still has to call on_leave
            watch.cancel()
        return replica

    def _check_not_evicted(self, name: str) -> None:
        if reason := self.evicted.get(name):
            raise ReplicaEvictedError(f"replica {name} was evicted: {reason}. It must be replaced")

    async def _watch_life(self, name: str, replica: Replica, liveness_ref: BoxedRef) -> None:
        """Remove a replica when it dies. Serve starts a replacement, which has its own name."""
        try:
            await liveness_ref[0]
        except RayError as error:
            logger.warning("engine replica %s died: %s", name, type(error).__name__)
        if self.is_live(name, replica):
            self.remove(name)
            self._on_change()
        if self._on_leave is not None:
            await self._on_leave(name)

    async def _watch_return(self, name: str, replica: Replica) -> None:
        """Evict a replica that does not subscribe again after a restart of the coordinator."""
        await pause(RETURN_TIMEOUT_S)
        self.evict(name, f"it did not return within {RETURN_TIMEOUT_S:g} s of the coordinator's restart")

    def is_live(self, name: str, replica: Replica) -> bool:
        """Return True if the replica has neither left nor subscribed again."""
        return self.get(name) is replica

    def ready(self) -> int:
        """Return the number of replicas that have caught up."""
        return sum(replica.state.serves for replica in self.values())

    def counted(self) -> dict[str, Replica]:
        """Return the replicas that an order waits for. Those that have not returned yet count too."""
        lacking = self._lack_weights()
        return {name: replica for name, replica in self.items() if name not in lacking}

    def lacking(self) -> dict[str, Replica]:
        """Return the replicas that are to receive the current weights."""
        number = self.standing.number if self.standing else 0
        return {name: replica for name, replica in self._lack_weights().items() if replica.failed != number}

    def _lack_weights(self) -> dict[str, Replica]:
        weights = self.standing
        if weights is None:
            return {}
        return {name: r for name, r in self.items() if r.present and not weights.is_reached(r.state)}

    def all_reached(self, order: Order) -> bool:
        """Return True if there are replicas, and all that count have reached an order."""
        counted = self.counted()
        return bool(counted) and all(replica.has_reached(order) for replica in counted.values())


@dataclass
class PendingOrder:
    """The order that the trainer waits for.

    Attributes:
        before: what all replicas have reached of its subject, and the order supersedes.
        last_version: highest version before the order.
        probe_number: number of the task to probe, if the order has one.
        sender_failure: reason why the sender of weights failed.
        extensions: reasons for which the deadline was extended, each once.
        results, failures: by replica.
    """

    order: Order
    quorum: Quorum
    issued: float
    before: Order | None
    last_version: int
    probe_number: int
    sender_failure: str = ""
    extensions: set[str] = field(default_factory=set)
    results: dict[str, object] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.deadline = self.issued + self.order.timeout
        self._evicted_before = len(self.quorum.evicted)

    @property
    def seconds(self) -> float:
        """Time that the replicas have in all."""
        return self.deadline - self.issued

    @property
    def evicted(self) -> list[str]:
        """Replicas that were evicted meanwhile, with the reasons."""
        evicted = list(self.quorum.evicted.items())[self._evicted_before :]
        return [f"{name} ({reason})" for name, reason in evicted]

    def extend(self, reason: str, deadline: float) -> None:
        """Move the deadline, unless it was moved for this reason before."""
        if reason not in self.extensions:
            self.extensions.add(reason)
            self.deadline = max(self.deadline, deadline)

    def has_reached(self, name: str, replica: Replica) -> bool:
        """Return True if a replica has reached the order, and has answered its probe."""
        return replica.has_reached(self.order) and (not self.order.ids or name in self.results)

    def reached(self) -> list[str]:
        """Return the replicas that count and have reached the order."""
        return [name for name, r in self.quorum.counted().items() if self.has_reached(name, r)]

    def outcomes(self) -> dict[str, object]:
        """Return the results of the replicas that have reached the order."""
        if self.order.kind == "sleep":
            return {name: self.quorum[name].state.awake_reason for name in self.reached()}
        return {name: self.results.get(name) for name in self.reached()}

    def _received(self) -> list[str]:
        return [name for name, replica in self.quorum.counted().items() if replica.has_reached(self.order)]

    def failed(self) -> list[str]:
        """Return the replicas that count and have failed the order."""
        counted = self.quorum.counted().items()
        return sorted(name for name, replica in counted if replica.failed == self.order.number)

    def waiting(self) -> list[str]:
        """Return the replicas that count and have neither reached nor failed the order."""
        return sorted(self.quorum.counted().keys() - {*self.reached(), *self.failed()})

    def end_waiting(self, needed: int, now: float) -> None:
        """Evict the replicas that are late at the end of the order's time, or when the sender has failed.

        Those that had received the weights before it failed have the rest of the time for their probe.

        Args:
            needed: number of replicas that must reach the order.

        Raises:
            WeightSyncError: not enough replicas have reached the order.
        """
        order, seconds = self.order, round(self.seconds, 2)
        reached = self.reached() if now >= self.deadline else self._received()
        late = sorted({*self.waiting()} - {*reached})
        if not reached and self.sender_failure:
            raise WeightSyncError(f"{order} was not sent: {self.sender_failure}")
        gone = ", ".join(self.evicted) or "a dead replica"
        missing = ", ".join(late) or f"a replacement for {gone}"
        if not reached:
            raise WeightSyncError(f"{order} did not reach {missing} within {seconds:g} s")
        for name in late:
            self.quorum.evict(name, self.sender_failure or f"it had not executed {order} after {seconds:g} s")
        if len(reached) < needed:
            raise WeightSyncError(
                f"{order} reached {len(reached)} replicas within {seconds:g} s, and engine.min_replicas is "
                f"{needed}: it did not reach {missing}. See why replicas end with `ray logs`, or lower "
                "engine.min_replicas"
            )

    def limit(self, name: str) -> tuple[float, str]:
        """Return the time at which a replica is too late, and the reason.

        A frozen process sends nothing, and is noticed early. A replica that still reports may have a slow
        network or a large model, and gets most of the time. For weights it may wait for their sender.
        """
        order, replica = self.order, self.quorum[name]
        began, total = max(self.issued, replica.since), LATE_SHARE * order.timeout
        silent = replica.silent_at(began, order.timeout, str(order))
        late = began + total, f"it had not executed {order} after {total:g} s"
        return silent if order.kind == "weights" else min(silent, late, key=lambda limit: limit[0])


@dataclass
class Transfer:
    """A transfer of weights in progress.

    Attributes:
        number, kind, started, infos: of the current phase; `infos` has the pickled argument of each member.
        answered: members that have executed, or failed, the current phase.
        handed: members that were handed the current phase, and have not reported since that they wait or have
            executed it.
        broken: the reason why it cannot go on; empty if it can.
    """

    order: Order
    members: dict[str, Replica]
    number: int = -1
    kind: Phase = "init"
    started: float = 0.0
    infos: Mapping[str, bytes] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    handed: set[str] = field(default_factory=set)
    broken: str = ""

    def begin(self, kind: Phase, number: int, now: float, infos: Mapping[str, bytes]) -> None:
        self.kind, self.number, self.started, self.infos = kind, number, now, infos
        self.answered, self.handed = set(), set()

    def waiting(self) -> list[str]:
        """Return the members that have not executed the current phase."""
        return sorted(self.members.keys() - self.answered)

    def left(self, quorum: Quorum) -> list[str]:
        """Return the live ones among them."""
        return [name for name in self.waiting() if quorum.is_live(name, self.members[name])]

    def remaining(self, quorum: Quorum) -> list[str]:
        """Return the live members that have not left the transfer, as far as they have reported."""
        live = {name: r for name, r in self.members.items() if quorum.is_live(name, r)}
        return [name for name, r in live.items() if r.state.updating or name in self.handed]

    @property
    def is_over(self) -> bool:
        """True if it is broken, or all members have received the weights."""
        return bool(self.broken) or (self.kind in FINAL and not self.waiting())

    def limit(self, pending: PendingOrder | None, timeout: float, name: str) -> tuple[float, str]:
        """Return the time at which a member is too late for the phase, and the reason.

        During "update" and "send" a member may wait for the sender, whose own connection has a timeout. A
        member that is late in another phase than "update" is evicted before the order's time ends, so that
        the order can wait for its replacement.

        Args:
            pending: the order that the trainer waits for.
            timeout: time that the version may take to reach all replicas.
        """
        total = timeout if self.kind == "send" else LATE_SHARE * timeout
        if pending is not None and pending.order is self.order:
            latest = pending.issued + LAST_EVICTION_SHARE * pending.seconds
            if self.started < latest:  # a later phase has what is left of the order's time
                total = min(total, latest - self.started)
        subject = f"the phase {self.kind!r} of version {self.order.version}"
        silent = self.members[name].silent_at(self.started, timeout, subject)
        after = round(max(total, 0.0), 2)
        late = self.started + total, f"it had not executed {subject} after {after:g} s"
        return silent if self.kind == "update" else min(silent, late, key=lambda limit: limit[0])
