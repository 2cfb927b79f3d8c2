"""The replica coordinator: issues weights, adapters, sleep and probes to all replicas, in one sequence.

Replicas subscribe and long-poll; the trainer issues orders, one at a time. Laws:

- A method that issues an order returns only when every live replica has executed it, and `versions` changes
  only then.
- Versions of weights and adapters come from one increasing sequence and are never reused. Only a version of
  the weights that no replica has received may be published again: nothing was sampled with it. A pin serves a
  published version of an adapter under a second name, which later versions leave alone until its release.
- Weights are not part of their order: the learners send them to all replicas at once, see `transfers`. A
  joining replica receives the current version by a transfer of its own, or with the next publication, and
  counts as live from then on. A replica that dies during a transfer breaks it, and the learners begin another
  one with those that are left.
- A replica that is too late for an order is evicted: it leaves the quorum and is killed, and Serve starts its
  replacement. So is a replica that fails an order which another one has executed. If all fail, or none
  executes the order within the timeout, the order fails with an error that names them.
- A transfer that is repeated, because a replica was lost in it, has the order's full time again, once.
- A failed order is withdrawn: a replica that joins later receives what all replicas had before it. Another
  order than one of weights remains current when it timed out: it completes when the late replicas acknowledge
  it, or is superseded.
- A joining replica receives all current orders in one response and counts as live from then on. Dead replicas
  leave the quorum. If none is left, the pending order waits for a replacement.
- A restarted coordinator continues from a snapshot. Until it is restored it answers no subscription and
  begins no order. Replicas of the snapshot count as live until they have returned or are evicted.
- References to superseded payloads are dropped.

Adapters travel through Ray's object store: replicas on the publisher's node map the same shared memory, each
other node gets a copy.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
from typing import Any

from raylight.engines.protocol import EngineLoad, UpdateMode
from raylight.errors import EngineStartError, WeightSyncError
from raylight.weight_sync.loads import LoadReports
from raylight.weight_sync.orders import Kind, Snapshot, Versions
from raylight.weight_sync.seeds import SamplingStreams
from raylight.weight_sync.starts import StartProgress, Starts
from raylight.weight_sync.transfer_sequence import TransferSequence

REMEMBERED_CALLS = 16
"""Calls of `issue` whose result is kept for a repetition."""


class ReplicaCoordinator(TransferSequence):
    """The orders that a trainer can issue."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._start_failure: str | None = None
        self._streams = SamplingStreams(restored=not self._restored)
        self._loads = LoadReports()
        self._starts = Starts(time.monotonic, self._replacement_timeout_s)
        self._calls: collections.OrderedDict[str, asyncio.Task[Any]] = collections.OrderedDict()
        self.publication_s: float | None = None
        """Seconds of the last publication that succeeded."""

    async def report_start_failure(self, reason: str) -> None:
        """Record that a replica failed before it could subscribe."""
        self._start_failure = reason
        self._notify()

    async def forget_start_failure(self) -> None:
        """Forget the failure of an earlier replica, before others start."""
        self._start_failure = None

    async def sampling_stream(self, replica: str) -> str:
        """Return the name of a starting replica's stream of random numbers, which no other replica has."""
        return self._streams.name_for(replica)

    async def report_start(self, replica: str, stage: str, work: int, entered: bool) -> None:
        """Take a report of a replica that starts, see `Starts.report`."""
        if self._starts.report(replica, stage, work, entered):
            self._changed.notify_all()

    async def end_start(self, replica: str) -> None:
        """Note that a replica is up, or has failed."""
        self._starts.end(replica)
        self._changed.notify_all()

    async def enter_start(self, replica: str, timeout: float) -> bool:
        """Wait up to `timeout` seconds until a replica that starts may take device memory; True if it may."""
        await self._wait_until_restored()
        return await self._changed.wait_for(lambda: self._starts.enter(replica), timeout)

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

    def snapshot(self) -> Snapshot:
        return dataclasses.replace(super().snapshot(), holds=tuple(self._starts.holds))

    async def restore(self, snapshot: Snapshot) -> None:
        if not self._restored:
            self._starts.holds = dict.fromkeys(snapshot.holds, True)
        await super().restore(snapshot)

    async def wait_for_start(self, count: int, progressed: int, timeout: float) -> StartProgress:
        """Wait up to `timeout` seconds until `count` replicas have caught up, or a start has progressed.

        Args:
            progressed: number of reports of progress that the caller knows.

        Raises:
            EngineStartError: a replica failed to start.
        """

        def ready() -> int:
            return self._quorum.caught_up() if self._restored else 0

        await self._changed.wait_for(
            lambda: bool(self._start_failure) or ready() >= count or self._starts.progressed != progressed,
            timeout,
        )
        if self._start_failure:
            raise EngineStartError(f"an engine replica failed to start: {self._start_failure}")
        return StartProgress(ready(), self._starts.progressed, self._starts.stages())

    async def wait_for_replicas(self, count: int) -> Snapshot:
        """Wait until exactly `count` replicas are subscribed, all of which have caught up; return the state
        then.

        Raises:
            EngineStartError: a replica has failed to start since `forget_start_failure`.
        """
        await self._changed.wait_for(
            lambda: (
                bool(self._start_failure)
                or (self._restored and len(self._quorum.handles()) == count == self._quorum.caught_up())
            )
        )
        if self._start_failure:
            raise EngineStartError(f"an engine replica failed to start: {self._start_failure}")
        return self.snapshot()

    async def issue(self, key: str, method: str, *args: Any) -> tuple[Any, Snapshot]:
        """Call a method that issues an order; return its result and the state thereafter.

        A caller whose connection broke repeats its call. The repetition joins the first call.

        Args:
            key: identifies the call.
        """
        await self._wait_until_restored()
        if key not in self._calls:
            self._calls[key] = asyncio.ensure_future(getattr(self, method)(*args))
            while len(self._calls) > REMEMBERED_CALLS:
                self._calls.popitem(last=False)
        try:
            result = await asyncio.shield(self._calls[key])
        except WeightSyncError:  # its traceback would keep the payload alive
            self._calls.pop(key, None)
            raise
        return result, self.snapshot()

    async def report_load(self, replica: str, measured_in: int, load: EngineLoad, timeout: float) -> int:
        """Take a replica's load, see `LoadReports.report`."""
        return await self._loads.report(replica, measured_in, load, timeout)

    async def loads(self, timeout: float) -> dict[str, EngineLoad]:
        """Return the loads of the live replicas that report within `timeout` seconds."""
        return await self._loads.collect(self._quorum.__contains__, timeout)

    async def versions(self) -> Versions:
        """Return the state that all live replicas have reached."""
        completed = self._completed
        adapters = {o.adapter: o.version for o in completed.values() if o.kind == "adapter" and o.adapter}
        weights, sleep = completed.get("weights"), completed.get("sleep")
        return Versions(weights.version if weights else 0, adapters, sleep.level if sleep else None)

    async def publish(
        self,
        version: int,
        payload_ref: list[Any] | None,
        timeout: float,
        mode: UpdateMode = "keep",
        adapter: str | None = None,
        token: str = "",
        probe: list[int] | None = None,
    ) -> dict[str, list[float] | None]:
        """Publish new weights, or a new version of an adapter, to all replicas.

        Args:
            payload_ref: one-element list holding a reference to the `LoraAdapter`; None for weights, whose
                sender calls `begin_transfer`.
            adapter: name of the adapter; None publishes weights.
            token: identifies the publication for the sender of the weights.
            probe: token ids of a prompt, of which each replica computes log-probs with what it has loaded.

        Returns:
            By replica that loaded them, once all have: the log-probs of `probe[1:]` at temperature 1. None
            without a probe, and of a replica that joined after the order.

        Raises:
            WeightSyncError: the version is not new, no replica has subscribed, the engines are asleep, all
                replicas failed, or the timeout expired.
        """
        if version <= self._last_version:
            raise WeightSyncError(
                f"version {version} is not newer than {self._last_version}; versions are never reused"
            )
        self._check_ready(awake_for=f"version {version} is published")
        before, self._last_version = self._last_version, version
        kind: Kind = "weights" if adapter is None else "adapter"
        started = time.monotonic()
        try:
            results = await self._execute(
                kind,
                timeout,
                token,
                version=version,
                payload_ref=payload_ref,
                mode=mode,
                adapter=adapter,
                ids=tuple(probe or ()),
            )
            self.publication_s = time.monotonic() - started
            return results
        except BaseException:
            self._break_transfer("its publication has ended")
            if kind == "weights" and self._received_version < version == self._last_version:
                self._last_version = before
            raise
        finally:
            self._ended_version = max(self._ended_version, min(version, self._last_version))
            self._notify()

    async def pin(self, name: str, version: int, payload_ref: list[Any], timeout: float) -> None:
        """Serve a published version of an adapter under another name too, on all replicas, until `release`.

        Args:
            payload_ref: as for `publish`.

        Raises:
            WeightSyncError: as for `publish`, but the version need not be new.
        """
        self._check_ready(awake_for=f"adapter {name!r} is served")
        await self._execute("adapter", timeout, version=version, payload_ref=payload_ref, adapter=name)

    async def release(self, name: str, timeout: float) -> None:
        """Serve an adapter no longer; requests in flight go on with it. Unknown names are ignored.

        Raises:
            WeightSyncError: as for `sleep`.
        """
        self._check_ready()
        await self._execute("release", timeout, adapter=name)

    async def sleep(self, timeout: float, level: int = 1) -> dict[str, str | None]:
        """Free the device memory of all engines.

        Returns:
            By replica, the reason why nothing was freed, or None if memory was freed.

        Raises:
            WeightSyncError: the level is not 1, no replica has subscribed, all replicas failed, or the
                timeout expired.
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
