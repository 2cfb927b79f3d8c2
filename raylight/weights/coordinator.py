"""The replica coordinator: has all replicas reach the state that the trainer orders, one order at a time.

Replicas subscribe, and then poll: each sends its state, and receives the next task on its way to the ordered
state. Laws:

- An order ends well only when every live replica has reached it, and is complete only then.
- Versions of weights and adapters come from one increasing sequence and are never reused. Weights whose
  publication has failed may be published again, unless a replica received them later: it does not receive
  them again, and the sender may have other weights by then. A pin serves a published version of an adapter
  under a second name, which later versions leave alone until its release.
- The learners send weights to a set of replicas, its members, in a transfer. A phase of it ends when all
  members have executed it. As soon as one fails, leaves or dies, the transfer is broken: the members abort
  it, and the learners begin another one with those that are left. A repeated transfer has the order's full
  time again, once.
- A joining replica executes all current orders before it serves. It receives the current weights in a
  separate transfer, or with the next publication, and counts as live from then on.
- A replica that is too late for an order is evicted: it is killed, and Serve starts its replacement. So is
  one that fails an order which another one has executed. If all fail, or none executes the order in time,
  the order fails with an error that names them. If no replica is left, it waits for a replacement, once.
- A failed order is withdrawn: a replica that joins later receives what all replicas had before it. An order
  of another kind than weights stays after its time, for late replicas, until a newer one supersedes it.
- A restarted coordinator continues from a snapshot. Until it is restored it answers no subscription and
  begins no order. Replicas of the snapshot count as live until they have returned or are evicted. The last
  publication is answered from the snapshot if its caller repeats the call, and is not executed again.
- References to superseded payloads are dropped.

Replicas poll, and are not called: a joining replica receives weights before Serve routes calls to it, and
`DeploymentHandle.broadcast` neither reaches it nor names a replica that is frozen.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import replace
from typing import Any

from raylight._utils.aio import BroadcastCondition
from raylight.errors import EngineStartError, TransferBrokenError, WeightSyncError
from raylight.weights.orders import (
    UNDOING,
    BoxedRef,
    Member,
    Order,
    Phase,
    ReplicaReport,
    ReplicaState,
    Snapshot,
    Task,
    TaskAnswer,
    VersionSequence,
    next_order,
    withdraw,
)
from raylight.weights.protocol import EngineLoad
from raylight.weights.quorum import PendingOrder, Quorum, Replica, Transfer
from raylight.weights.starts import SamplingStreams, StartProgress, Starts

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 30.0
"""Longest time that a poll waits for a task."""
BUSY_POLL_TIMEOUT_S = 2.0
"""Longest time that a poll waits while an order or a transfer is under way: each poll proves that its replica
is not frozen."""
ABORT_TIMEOUT_S = 10.0
"""Time in which a member must abort a broken transfer."""
UNNUMBERED = 0
"""Number of the tasks that belong to no order."""
REMEMBERED = 16
"""Number of ended publications, and of results of calls, that are kept for their callers."""


class ReplicaCoordinator:
    """State machine of the replicas, the trainer's orders and the learners' transfers.

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
        self._replacement_timeout_s, self._min_replicas = replacement_timeout_s, min_replicas
        self._restored = restored
        self._changed = BroadcastCondition()
        self._generation = self._number = self._round = 0
        self._versions = VersionSequence()
        self._desired: dict[str, Order] = {}
        self._completed: dict[str, Order] = {}
        self._quorum = Quorum(on_leave, kill, self._update_completed)
        self._pending: PendingOrder | None = None
        self._transfer: Transfer | None = None
        self._turns: list[object] = []
        """Orders, of which the first is executed and the others wait."""
        self._failed_senders: dict[str, str] = {}
        """Reason for which the sender of an order that has not begun failed, by the order's token."""
        self._calls: collections.OrderedDict[str, asyncio.Task[dict[str, object]]] = collections.OrderedDict()
        self._answers: dict[str, dict[str, object]] = {}
        """Results of the last publication, by the key of its call; they outlast a restart."""
        self._ended_tokens: collections.deque[str] = collections.deque(maxlen=REMEMBERED)
        self._start_failure: str | None = None
        self._streams = SamplingStreams(restored=not restored)
        self._starts = Starts(time.monotonic, replacement_timeout_s)
        self.publication_s: float | None = None
        """Seconds of the last publication that succeeded."""

    # called by replicas

    async def wait_forever(self) -> None:
        """Never return.

        A replica owns the result of its call; awaiting that result raises as soon as the replica dies.
        """
        await asyncio.Event().wait()

    async def subscribe(
        self,
        name: str,
        state: ReplicaState,
        liveness_ref: BoxedRef | None = None,
        handle: object = None,
        workers: int = 1,
        node: str = "",
    ) -> None:
        """Add a replica, which polls from then on, in place of its earlier subscription if it has one.

        Args:
            liveness_ref: one-element list holding the reference to the result of `wait_forever` that the
                replica owns.
            handle: handle of the replica's actor.
            workers: number of its processes that receive weights.
            node: network address of its node.

        Raises:
            ReplicaEvictedError: the replica was evicted.
        """
        await self._wait_until_restored()
        replica = Replica(self._now(), handle, workers=workers, node=node, state=state)
        self._quorum.add(name, replica, liveness_ref)
        self._versions.note_received(state.weights)
        self._update_completed()

    async def poll(self, name: str, report: ReplicaReport) -> Task | None:
        """Take a replica's report, and return its next task; None: it is to report again.

        A task is returned until its answer has come, so that no lost response matters.

        Raises:
            NotSubscribedError: the replica must subscribe first.
            ReplicaEvictedError: the replica was evicted.
        """
        replica = self._quorum.find(name)
        changes = report.state != replica.state
        replica.heard, replica.state = self._now(), report.state
        replica.load, replica.load_round = report.load, self._round
        self._versions.note_received(report.state.weights)
        if self._transfer is not None and (report.waits or report.answer is not None):
            self._transfer.handed.discard(name)
        if report.answer is not None:
            changes = True
            self._take_answer(name, replica, report.answer)
        if changes:
            self._update_completed()
        else:
            self._changed.notify_all()
        if not report.waits:
            return None
        is_busy = self._pending is not None or (self._transfer is not None and not self._transfer.is_over)
        began, limit = self._round, BUSY_POLL_TIMEOUT_S if is_busy else POLL_TIMEOUT_S

        def is_due() -> bool:
            gone = self._quorum.get(name) is not replica
            return gone or self._round != began or self._next_task(name, replica) is not None

        await self._changed.wait_for(is_due, limit)
        task = self._next_task(name, self._quorum.find(name))
        if task is not None and self._transfer is not None and task.number == self._transfer.number:
            self._transfer.handed.add(name)
        return task

    async def leave(self, name: str) -> None:
        """Remove a replica that stops; unknown names are ignored."""
        await self._wait_until_restored()
        await self._quorum.leave(name)

    async def sampling_stream(self, name: str) -> str:
        """Return the name of a starting replica's stream of random numbers, which no other replica has."""
        return self._streams.name_for(name)

    async def report_start(self, name: str, stage: str, work: int, entered: bool) -> None:
        """Take a report of a replica that starts, see `Starts.report`."""
        if self._starts.report(name, stage, work, entered):
            self._changed.notify_all()

    async def end_start(self, name: str) -> None:
        """Note that a replica is up, or has failed."""
        self._starts.end(name)
        self._changed.notify_all()

    async def enter_start(self, name: str, timeout: float) -> bool:
        """Wait up to `timeout` seconds until a replica that starts may take device memory; True if it may."""
        await self._wait_until_restored()
        return await self._changed.wait_for(lambda: self._starts.enter(name), timeout)

    async def report_start_failure(self, reason: str) -> None:
        """Record that a replica failed before it could subscribe."""
        self._start_failure = reason
        self._notify()

    async def forget_start_failure(self) -> None:
        """Forget the failure of an earlier replica, before others start."""
        self._start_failure = None

    async def hold_starts(self, token: str, timeout: float) -> bool:
        """Wait up to `timeout` seconds until no replica takes device memory; True if none does, or will until
        `release_starts`. No further one enters meanwhile."""
        await self._wait_until_restored()
        is_new = token not in self._starts.holds
        held = await self._changed.wait_for(lambda: self._starts.hold(token), timeout)
        if is_new:
            self._notify()  # the hold is part of the snapshot
        return held

    async def release_starts(self, token: str) -> None:
        """Let replicas take device memory again."""
        self._starts.release(token)
        self._notify()

    async def wait_for_start(self, count: int, progressed: int, timeout: float) -> StartProgress:
        """Wait up to `timeout` seconds until `count` replicas have caught up, or a start has progressed.

        Args:
            progressed: number of reports of progress that the caller has.

        Raises:
            EngineStartError: a replica failed to start.
        """
        await self._wait_unless_start_failed(
            lambda: self._quorum.ready() >= count or self._starts.progressed != progressed, timeout
        )
        return StartProgress(self._quorum.ready(), self._starts.progressed, self._starts.stages())

    async def wait_for_replicas(self, count: int) -> Snapshot:
        """Wait until exactly `count` replicas are subscribed, all of which have caught up; return the state
        then.

        Raises:
            EngineStartError: a replica has failed to start since `forget_start_failure`.
        """
        await self._wait_unless_start_failed(lambda: len(self._quorum) == count == self._quorum.ready())
        return self.snapshot()

    async def _wait_unless_start_failed(
        self, holds: Callable[[], bool], timeout: float | None = None
    ) -> None:
        await self._changed.wait_for(
            lambda: bool(self._start_failure) or (self._restored and holds()), timeout
        )
        if self._start_failure:
            raise EngineStartError(f"an engine replica failed to start: {self._start_failure}")

    # called by the trainer

    async def issue(self, key: str, order: Order) -> tuple[dict[str, object], Snapshot]:
        """Issue an order, and wait until every replica has reached it.

        A caller whose connection broke repeats its call. The repetition joins the first call.

        Args:
            key: identifies the call.

        Returns:
            By replica, the log-probs of `order.ids[1:]`, or None if it has computed none; for "sleep" the
            reason why nothing was freed. And the state thereafter.

        Raises:
            WeightSyncError: the version is not new, no replica has subscribed, the engines are asleep, all
                replicas failed, or the timeout expired.
        """
        await self._wait_until_restored()
        if key in self._answers:
            return self._answers[key], self.snapshot()
        if key not in self._calls:
            self._calls[key] = asyncio.ensure_future(self._execute(key, order))
            while len(self._calls) > REMEMBERED:
                self._calls.popitem(last=False)
        try:
            results = await asyncio.shield(self._calls[key])
        except WeightSyncError:  # its traceback would keep the payload alive
            self._calls.pop(key, None)
            raise
        return results, self.snapshot()

    async def fail_publication(self, token: str, reason: str) -> None:
        """End a publication, because its sender failed."""
        if self._pending is not None and self._pending.order.token == token:
            self._pending.sender_failure = reason
            self._break_transfer(reason)
        elif token not in self._ended_tokens:
            self._failed_senders[token] = reason
        self._notify()

    async def loads(self, timeout: float) -> dict[str, EngineLoad]:
        """Return the loads of the replicas that report within `timeout` seconds.

        All waiting polls end, so that each replica reports again. Nothing is sent while nobody asks.
        """
        begun = self._begin_round()

        def reported() -> dict[str, EngineLoad]:
            return {n: r.load for n, r in self._quorum.items() if r.load and r.load_round >= begun}

        await self._changed.wait_for(lambda: len(reported()) == self._quorum.ready(), timeout)
        return reported()

    # called by the sender of weights

    async def begin_transfer(self, version: int, token: str = "") -> list[Member] | None:
        """Wait until replicas lack a version, and begin a transfer to them.

        Args:
            token: the publication's; empty for a transfer of the current version to replicas that joined.

        Returns:
            The members; None if the publication has ended, or no replica lacks the version.
        """
        await self._wait_until_restored()
        self._break_transfer("its sender began another one")
        await self._wait_until_aborted()
        await self._changed.wait_for(
            lambda: not token or token in self._ended_tokens or bool(self._receivers(token))
        )
        members, order = self._receivers(token), self._desired.get("weights")
        if not members or order is None or order.version != version:
            self._transfer = None
            return None
        if token and self._pending is not None and self._transfer and self._transfer.order is order:
            # the transfer before may have waited long for a hung replica
            self._pending.extend("repetition", self._now() + order.timeout)
        self._transfer = Transfer(order, members)
        self._begin_round()
        return [Member(name, r.workers, r.node) for name, r in sorted(members.items())]

    async def run_phase(self, kind: Phase, infos: Mapping[str, bytes], timeout: float) -> None:
        """Have all members of the transfer execute a phase.

        Args:
            infos: argument of each member, pickled.
            timeout: time that the version may take to reach all replicas.

        Raises:
            TransferBrokenError: a member failed or was lost. The others abort the transfer.
        """
        transfer = self._transfer
        if transfer is None or transfer.broken:
            raise TransferBrokenError("the transfer has ended")
        transfer.begin(kind, self._next_number(), self._now(), infos)
        self._notify()
        while not transfer.broken and (waiting := transfer.waiting()):
            if self._transfer is not transfer:
                raise TransferBrokenError("another transfer has begun")
            if gone := sorted(set(waiting) - set(transfer.left(self._quorum))):
                self._break_transfer(f"{', '.join(gone)} was lost")
            else:
                limit = functools.partial(transfer.limit, self._pending, timeout)
                await self._evict_late(functools.partial(transfer.left, self._quorum), limit)
        if transfer.broken:
            raise TransferBrokenError(transfer.broken)

    # restarts

    def snapshot(self) -> Snapshot:
        """Return the state from which a restarted coordinator can continue."""
        desired, version, pending = dict(self._desired), self._versions.used, self._pending
        if pending is not None:
            version = pending.last_version
            withdraw(desired, pending.order, pending.before)
        return Snapshot(
            self._generation,
            self._number,
            version,
            self._versions.received,
            desired,
            dict(self._completed),
            {name: replica.handle for name, replica in self._quorum.items()},
            dict(self._quorum.evicted),
            self._quorum.ever_subscribed,
            frozenset(self._receivers()),
            tuple(self._ended_tokens),
            tuple(self._starts.holds),
            self._answers,
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
        # a late answer to the coordinator before must not be taken for one to a task of this one
        self._number = snapshot.number + secrets.randbits(40)
        self._generation = snapshot.generation
        self._versions.restore(snapshot)
        self._desired, self._completed = dict(snapshot.desired), dict(snapshot.completed)
        self._quorum.evicted, self._quorum.ever_subscribed = dict(snapshot.evicted), snapshot.ever_subscribed
        self._ended_tokens.extend(snapshot.ended_tokens)
        self._starts.holds = dict.fromkeys(snapshot.holds, True)
        self._answers = snapshot.answers
        for name, handle in snapshot.replicas.items():
            self._quorum.expect(name, Replica(self._now(), handle, present=False))
        self._restored = True
        self._notify()

    async def _wait_until_restored(self) -> None:
        await self._changed.wait_for(lambda: self._restored)

    def _receivers(self, token: str = "") -> dict[str, Replica]:
        """Return the replicas that are to receive the weights of a publication next.

        Args:
            token: the publication's; empty for the current weights.
        """
        pending, weights, found = self._pending, self._quorum.standing, dict(self._quorum.lacking())
        if token:
            if pending is None or pending.order.token != token:
                return {}
            weights, found = pending.order, {name: self._quorum[name] for name in pending.waiting()}
        return {
            name: r
            for name, r in found.items()
            if r.present and next_order(self._desired, r.state, r.failed) is weights
        }

    # tasks

    def _next_task(self, name: str, replica: Replica) -> Task | None:
        """Return the next task by which a replica comes to the ordered state; None if there is none now."""
        state, transfer = replica.state, self._transfer
        if transfer is not None and not transfer.broken and transfer.members.get(name) is replica:
            if transfer.number >= 0 and name not in transfer.answered:
                return Task(transfer.number, transfer.kind, transfer.order, transfer.infos.get(name))
            if not transfer.is_over:
                return None
        if state.updating:
            return Task(UNNUMBERED, "abort")
        if (order := next_order(self._desired, state, replica.failed)) is not None:
            return None if order.kind == "weights" else Task(order.number, order.kind, order)
        pending = self._pending
        if pending and not pending.has_reached(name, replica):
            can_probe = pending.order.ids and pending.order.is_reached(state)
            if can_probe and replica.failed != pending.order.number and name in self._quorum.counted():
                return Task(pending.probe_number, "probe", pending.order)
        has_failed = any(order.number == replica.failed for order in self._desired.values())  # it will end
        return None if state.serves or has_failed else Task(UNNUMBERED, "serve")

    def _take_answer(self, name: str, replica: Replica, answer: TaskAnswer) -> None:
        """Record the outcome of a task."""
        transfer, pending = self._transfer, self._pending
        if transfer is not None and transfer.number == answer.number:
            if transfer.members.get(name) is not replica:
                return
            if answer.failure and not answer.lost:
                self._fail(name, replica, transfer.order, answer.failure)
            if answer.failure:
                self._break_transfer(f"{name}: {answer.failure}")
            transfer.answered.add(name)
            return
        is_probe = pending is not None and pending.probe_number == answer.number
        if answer.failure:
            ordered = [order for order in self._desired.values() if order.number == answer.number]
            order = pending.order if pending and is_probe else next(iter(ordered), None)
            if order is not None or answer.number == UNNUMBERED:
                self._fail(name, replica, order, answer.failure)
        elif pending and is_probe:
            pending.results[name] = answer.result

    def _fail(self, name: str, replica: Replica, order: Order | None, reason: str) -> None:
        """Record that a replica failed an order; None: to leave a state that is no longer ordered."""
        logger.warning("engine replica %s failed: %s", name, reason)
        if order is not None:
            replica.failed = order.number
            if self._pending is not None and self._pending.order is order:
                self._pending.failures[name] = reason
                return
            if self._completed.get(order.subject) is not order:  # its time was over
                withdraw(self._desired, order, self._completed.get(order.subject))
                return
        if replica.state.serves:  # another one ends by itself
            self._quorum.evict(name, reason)

    # execution of orders

    async def _execute(self, key: str, order: Order) -> dict[str, object]:
        """Issue an order after all earlier ones, and wait until every replica has reached it."""
        started = self._now()
        async with self._turn(order):
            order.check(self._versions.used, self._quorum.ever_subscribed, self._desired.get("sleep"))
            order = replace(order, number=self._next_number())
            pending = self._pending = PendingOrder(
                order,
                self._quorum,
                issued=self._now(),
                before=self._completed.get(order.subject),
                last_version=self._versions.used,
                probe_number=self._next_number(),
            )
            if order.kind != "probe":
                self._desired[order.subject] = order
            if order.publishes:
                self._versions.begin(order.version)
            if order.kind in UNDOING:  # the state that it undoes is no longer complete on all replicas
                self._completed.pop(order.subject, None)
            self._update_completed()
            self._begin_round()
            try:
                await self._wait_for_replicas(pending)
            except BaseException:
                if order.kind == "weights":  # they travel only while the order is pending
                    withdraw(self._desired, order, pending.before)
                    withdraw(self._completed, order, pending.before)  # all may have it, and be too few
                    self._break_transfer("its publication has ended")
                    self._versions.fail(pending.last_version)
                raise
            finally:
                self._pending = None
                self._update_completed()
        if order.publishes:
            self.publication_s = self._now() - started
            self._answers = {key: pending.outcomes()}
        return pending.outcomes()

    @contextlib.asynccontextmanager
    async def _turn(self, order: Order) -> AsyncIterator[None]:
        """A context that begins when all earlier orders have ended, and for weights their transfer.

        Raises:
            WeightSyncError: they have not within the order's time, or the sender of the weights has failed.
        """
        self._turns.append(turn := object())
        try:
            if not await self._changed.wait_for(
                lambda: order.token in self._failed_senders or self._turns[0] is turn, order.timeout
            ):
                pending = self._pending
                reason = f"{pending.order} is still under way" if pending else "others were before it"
                raise WeightSyncError(
                    f"the {order.kind} order could not begin within {order.timeout:g} s: {reason}"
                )
            if failure := self._failed_senders.get(order.token):
                raise WeightSyncError(f"{order} was not sent: {failure}")
            if order.kind == "weights":  # else a member could finish it, as if it were the new one
                await self._wait_until_aborted()
            yield
        finally:
            self._turns.remove(turn)
            if order.token:
                self._failed_senders.pop(order.token, None)
                self._ended_tokens.append(order.token)
            self._notify()

    async def _wait_for_replicas(self, pending: PendingOrder) -> None:
        """Wait until every replica has reached an order, and evict late ones. While too few are left, wait
        longer, once.

        Raises:
            WeightSyncError: no replica has reached the order in time.
        """
        order = pending.order
        needed = self._min_replicas if order.kind in ("weights", "adapter") else 1

        def lacks_replicas() -> bool:
            return len(self._quorum.counted()) < needed and "replacement" not in pending.extensions

        while True:
            if self._quorum.counted() and not pending.waiting():
                self._judge_failures(pending)
                if len(self._quorum.counted()) >= needed:
                    return
            if lacks_replicas():
                pending.extend("replacement", pending.deadline + self._replacement_timeout_s)
                logger.warning("%s waits for a replacement of the engine replicas, which are gone", order)
            await self._evict_late(pending.waiting, pending.limit, pending.deadline)
            if pending.sender_failure:
                await self._wait_until_aborted()  # a member that has all weights finishes
            if pending.sender_failure or (self._now() >= pending.deadline and not lacks_replicas()):
                pending.end_waiting(needed, self._now())

    def _judge_failures(self, pending: PendingOrder) -> None:
        """Evict the replicas that failed an order which others have reached.

        Raises:
            WeightSyncError: all replicas failed.
        """
        order = pending.order
        failed = pending.failed()
        if failed and not pending.reached():
            withdraw(self._desired, order, pending.before)
            if pending.before is not None:
                self._completed[order.subject] = pending.before
            raise WeightSyncError("; ".join(f"{name}: {pending.failures[name]}" for name in failed))
        for name in failed:
            self._quorum.evict(name, pending.failures[name])

    def _update_completed(self) -> None:
        """Record the orders that all live replicas have reached by now."""
        is_publishing = self._pending is not None and self._pending.order.kind == "weights"
        self._quorum.standing = None if is_publishing else self._completed.get("weights")
        for subject, order in list(self._desired.items()):
            is_pending = self._pending is not None and self._pending.order is order
            if order.kind in UNDOING:
                if not is_pending and all(order.is_reached(r.state) for r in self._quorum.values()):
                    del self._desired[subject]
            elif self._quorum.all_reached(order):
                self._completed[subject] = order
        self._notify()

    # transfers

    def _break_transfer(self, reason: str) -> None:
        """Have the members abort the transfer, unless it is over."""
        if self._transfer is not None and not self._transfer.is_over:
            self._transfer.broken = reason
            self._notify()

    async def _wait_until_aborted(self) -> None:
        """Wait until the members of a broken transfer have left it, and evict those that do not."""
        transfer = self._transfer
        if transfer is None or not transfer.broken:
            return
        remaining = functools.partial(transfer.remaining, self._quorum)
        await self._changed.wait_for(lambda: not remaining(), ABORT_TIMEOUT_S)
        for name in remaining():
            self._quorum.evict(
                name, f"it did not abort a broken weight transfer within {ABORT_TIMEOUT_S:g} s"
            )

    async def _evict_late(
        self,
        waiting: Callable[[], list[str]],
        limit: Callable[[str], tuple[float, str]],
        until: float = float("inf"),
    ) -> None:
        """Wait for a change until a replica that is waited for is too late, and evict it.

        Args:
            limit: returns the time at which a replica is too late, and the reason.
        """
        seen = self._generation
        wake_at = min([until, *(limit(name)[0] for name in waiting())])
        timeout = None if wake_at == float("inf") else wake_at - self._now()
        await self._changed.wait_for(lambda: self._generation != seen, timeout)
        for name in waiting():
            time_limit, reason = limit(name)
            if self._now() >= time_limit:
                self._quorum.evict(name, reason)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _begin_round(self) -> int:
        """End all waiting polls, so that each replica reports again; return the number of the round."""
        self._round += 1
        self._changed.notify_all()  # the snapshot does not change
        return self._round

    def _notify(self) -> None:
        self._generation += 1
        self._changed.notify_all()
