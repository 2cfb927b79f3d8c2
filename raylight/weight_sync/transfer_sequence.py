"""The transfers of weights, one at a time: what their sender and their members call. See `transfers`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from raylight.errors import TransferBrokenError
from raylight.weight_sync.order_sequence import OrderSequence
from raylight.weight_sync.quorum import LATE_SHARE, Subscription, silence_limit
from raylight.weight_sync.transfers import FINAL, Member, Phase, PhaseKind, Transfer

ABORT_TIMEOUT_S = 10.0
"""Time in which a member must abort a broken transfer."""
LAST_EVICTION_SHARE = 0.95
"""Share of an order's time after which members that hang are evicted."""


class TransferSequence(OrderSequence):
    """The transfers that the sender of weights can run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._transfer: Transfer | None = None
        self._phase_number = 0

    # called by the sender

    async def begin_transfer(self, version: int, token: str = "") -> list[Member] | None:
        """Wait until replicas lack a version, and begin a transfer to them.

        Args:
            token: the publication's; empty for a transfer of the current version to replicas that joined.

        Returns:
            The members; None if the publication has ended, or no replica lacks the version.
        """
        await self._wait_until_restored()
        await self._end_transfer("its sender began another one")
        await self._changed.wait_for(lambda: self._is_over(token) or bool(self._lacking(version, token)))
        members = self._lacking(version, token)
        number, pending = self._number_of_weights(), self._pending
        if (
            token
            and members
            and pending is not None
            and self._transfer is not None
            and self._transfer.order == number
        ):
            now = asyncio.get_running_loop().time()  # the one before may have waited long for a hung replica
            pending.extend("repetition", now + pending.order.timeout)
        self._transfer = Transfer(version, number, members) if members else None
        return [Member(name, s.workers, s.node) for name, s in sorted(members.items())] or None

    async def run_phase(self, kind: PhaseKind, infos: Mapping[str, bytes], timeout: float) -> None:
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
        self._begin_phase(transfer, kind, infos)
        clock = asyncio.get_running_loop().time
        while not transfer.broken and (waiting := transfer.waiting()):
            gone = [name for name in waiting if not self._quorum.is_current(name, transfer.members[name])]
            if gone:
                transfer.broken = f"{', '.join(gone)} was lost"
                break
            if self._transfer is not transfer:
                raise TransferBrokenError("another transfer has begun")
            late = {name: self._lateness(transfer, name, timeout) for name in waiting}
            seen = self._generation
            wake_at = min(time for time, _ in late.values())
            await self._changed.wait_for(lambda: self._generation != seen, wake_at - clock())  # noqa: B023
            for name in set(waiting) & set(transfer.waiting()):
                time, reason = self._lateness(transfer, name, timeout)
                if clock() >= time and self._quorum.is_current(name, transfer.members[name]):
                    self._evict(name, reason)
        if transfer.broken:
            self._begin_phase(transfer, "abort")
            raise TransferBrokenError(transfer.broken)

    async def fail_publication(self, token: str, reason: str) -> None:
        """End a publication, because its sender failed."""
        if self._pending is not None and self._pending.token == token:
            self._pending.sender_failure = reason
        self._break_transfer(reason)
        self._notify()

    # called by replicas

    async def next_phase(self, replica: str, after: int, version: int, timeout: float) -> Phase | None:
        """Return the phase after number `after`; None if there is none within `timeout` seconds.

        Args:
            version: the version that the replica waits for. When its publication has failed, the phase is
                "withdrawn".

        Raises:
            NotSubscribedError: the replica must subscribe first.
            ReplicaEvictedError: the replica was evicted.
        """
        await self.heartbeat(replica)

        def find() -> Phase | None:
            phase = self._transfer.phase_for(replica, after) if self._transfer else None
            if phase is None and not self._is_ordered(version):
                return Phase(after, "withdrawn", version)
            return phase

        await self._changed.wait_for(lambda: find() is not None or replica not in self._quorum, timeout)
        await self.heartbeat(replica)
        return find()

    async def acknowledge_phase(
        self, replica: str, number: int, failure: str | None = None, lost: bool = False
    ) -> None:
        """Record that a member has executed a phase, or failed.

        Args:
            lost: True if it failed because another process was lost; it may take part in the next transfer.

        Raises:
            NotSubscribedError, ReplicaEvictedError: as for `next_phase`.
        """
        await self.heartbeat(replica)
        transfer, subscription = self._transfer, self._quorum.find(replica)
        if transfer is not None and subscription is not None and transfer.number == number:
            transfer.answer(replica, failure)
            if transfer.kind in FINAL and not failure:
                subscription.received, subscription.lacks = transfer.version, 0
                self._received_version = max(self._received_version, transfer.version)
            if failure and not lost:  # it acknowledges the order once more when it has aborted the transfer
                await self.acknowledge(replica, transfer.order, failure)
        self._notify()

    # bookkeeping

    def _begin_phase(
        self, transfer: Transfer, kind: PhaseKind, infos: Mapping[str, bytes] | None = None
    ) -> None:
        self._phase_number += 1
        transfer.begin(kind, self._phase_number, asyncio.get_running_loop().time(), infos)
        self._notify()

    def _break_transfer(self, reason: str) -> None:
        """Have the members abort the transfer, unless it is complete or has been broken."""
        transfer = self._transfer
        if transfer is not None and not transfer.broken and not transfer.complete:
            transfer.broken = reason
            self._begin_phase(transfer, "abort")

    async def _end_transfer(self, reason: str) -> None:
        """Wait until the members of a broken transfer have aborted it, and evict those that do not.

        Members that have executed the order of weights, or failed it, take no further part.
        """
        self._break_transfer(reason)
        transfer = self._transfer
        if transfer is None or not transfer.broken:
            return

        def left() -> list[str]:
            return [
                name
                for name in transfer.waiting()
                if self._quorum.is_current(name, transfer.members[name])
                and transfer.members[name].acknowledged < transfer.order
            ]

        await self._changed.wait_for(lambda: not left(), ABORT_TIMEOUT_S)
        for replica in left():
            self._evict(replica, f"it did not abort a broken weight transfer within {ABORT_TIMEOUT_S:g} s")

    def _lacking(self, version: int, token: str) -> dict[str, Subscription]:
        """Return the replicas that are to receive a version."""
        pending = self._pending
        if token:
            if pending is None or pending.token != token:
                return {}
            waiting = {name: self._quorum.find(name) for name in self._quorum.waiting(pending.order.number)}
            lacking = {name: s for name, s in waiting.items() if s is not None and s.present}
        else:
            standing = self._completed.get("weights")
            is_standing = standing is not None and standing.version == version
            is_publishing = pending is not None and pending.order.kind == "weights"
            lacking = self._quorum.lacking() if is_standing and not is_publishing else {}
        number = self._number_of_weights()
        return {name: s for name, s in lacking.items() if s.received < version and s.failed < number}

    def _number_of_weights(self) -> int:
        """Return the number of the current order of weights."""
        return self._current["weights"].number if "weights" in self._current else 0

    def _is_over(self, token: str) -> bool:
        """Return True if a publication has ended. A transfer to joined replicas is not waited for."""
        return not token or token in self._ended_tokens

    def _is_ordered(self, version: int) -> bool:
        current = self._current.get("weights")
        return current is not None and current.version >= version

    def _lateness(self, transfer: Transfer, replica: str, timeout: float) -> tuple[float, str]:
        """Return the time at which a member is too late for a phase, and the reason.

        A frozen process sends nothing. During "update" and "send" a member may wait for the sender, whose own
        connection has a timeout. A member that is late in another phase than "update" is evicted before the
        order's time ends, so that the order can wait for its replacement.
        """
        silence, total = silence_limit(timeout), LATE_SHARE * timeout
        if transfer.kind == "send":
            total = timeout
        if self._pending is not None and self._pending.order.number == transfer.order:
            latest = self._pending.issued + LAST_EVICTION_SHARE * self._pending.seconds
            if transfer.started < latest:  # a later phase has what is left of the order's time
                total = min(total, latest - transfer.started)
        subject = f"the phase {transfer.kind!r} of version {transfer.version}"
        silent = (
            max(transfer.started, transfer.members[replica].heard) + silence,
            f"it sent nothing for {silence:g} s during {subject}",
        )
        after = round(max(total, 0.0), 2)
        late = (transfer.started + total, f"it had not executed {subject} after {after:g} s")
        return silent if transfer.kind == "update" else min(silent, late)
