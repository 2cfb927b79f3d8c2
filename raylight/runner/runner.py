"""A runner: takes rollouts from the store and executes many at once. Needs only a store client and an event loop.

Laws: an attempt is decided after all its spans and rewards are in the store, in one step with the last of them; no agent waits
for the store; what the store no longer needs is cancelled; a runner whose agents do not let go is replaced, and the others that it
has end first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import psutil

from raylight.agent.hooks import HookDispatcher
from raylight.agent.litagent import LitAgent
from raylight.agent.resources import NamedResources
from raylight.errors import SpanError
from raylight.runner.execute import RolloutContext, execute
from raylight.runner.outcome import CANCELLED, Outcome, describe
from raylight.runner.threads import AgentThreads
from raylight.store.client import StoreClient
from raylight.store.rows import pickled, span_row
from raylight.traces.context import AttemptTrace
from raylight.traces.tracer import Tracer
from raylight.types import ResourcesUpdate, Rollout, Span

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 30.0
TAKE_AT_ONCE = 8
"""Rollouts per dequeue: few enough that runners share a small batch evenly."""
FLUSH_S = 1.0
"""How often the spans of attempts that go on are sent."""
HEARTBEAT_S = 10.0
"""Seconds between two heartbeats, at most."""
HEARTBEATS_PER_LEASE = 4
WORN_OUT = 16
"""Agents that were given up and still run; with so many a runner takes no more rollouts, and another takes its place."""

KEPT_RESOURCES = 8
"""Versions of the named resources that a runner keeps at once."""

Ending = Literal["worn out", "enough"]
"""Why a runner ended by itself: too many agents hang in it, or it has run `max_rollouts`."""


class Runner:
    """Executes rollouts until it is cancelled.

    Args:
        worker_id: the name under which the store knows this runner.
        max_concurrent: rollouts executed at once.
        secret: the run's secret, from which each attempt's API key is derived.
        max_rollouts: rollouts after which it ends; None for no limit.
        heartbeat_s: seconds between two heartbeats; fewer if the store's leases are short.
    """

    def __init__(
        self,
        worker_id: str,
        store: StoreClient,
        agent: LitAgent,
        tracer: Tracer,
        hooks: HookDispatcher,
        secret: str,
        max_concurrent: int,
        max_rollouts: int | None = None,
        heartbeat_s: float = HEARTBEAT_S,
    ) -> None:
        self.worker_id = worker_id
        self._store = store
        self._threads = AgentThreads()
        self._bench = RolloutContext(agent, tracer, hooks, secret, self._threads, time.time, runner=self)
        self._max_concurrent = max_concurrent
        self._left = max_rollouts
        self._heartbeat_s = heartbeat_s
        self._resources: dict[str, ResourcesUpdate] = {}
        self._fetching = asyncio.Lock()
        self._running: dict[str, asyncio.Task[None]] = {}
        """By attempt."""
        self._traces: dict[str, AttemptTrace] = {}
        self._over: set[str] = set()
        """Attempts that the store no longer needs."""
        self._process = psutil.Process()

    async def serve(self) -> Ending:
        """Take and execute rollouts; raises when the store is gone."""
        self._bench.tracer.setup()
        chores = [
            asyncio.create_task(work)
            for work in (self._take(), self._every(FLUSH_S, self._flush), self._heartbeats())
        ]
        try:
            await asyncio.wait(chores, return_when=asyncio.FIRST_COMPLETED)
            for chore in chores:
                if chore.done():
                    chore.result()
            return "enough" if self._left == 0 else "worn out"
        finally:
            tasks = [*chores, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._bench.tracer.teardown)

    async def _take(self) -> None:
        """Take rollouts while there is room; ends when this runner is to take no more, and what it has is done."""
        while True:
            await self._wait_while(lambda: len(self._running) >= self._max_concurrent)
            if self._left == 0 or self._threads.abandoned >= WORN_OUT:
                break
            limit = min(self._max_concurrent - len(self._running), TAKE_AT_ONCE, self._left or TAKE_AT_ONCE)
            for rollout in await self._poll(limit):
                self._start(rollout)
        await self._wait_while(lambda: bool(self._running))

    async def _poll(self, limit: int) -> list[Rollout]:
        """Take up to `limit` rollouts; what goes wrong with a running one is raised meanwhile, not after the poll."""
        taken = self._store.dequeue_many_rollouts(
            limit=limit, worker_id=self.worker_id, timeout=POLL_TIMEOUT_S
        )
        poll = asyncio.ensure_future(taken)
        try:
            while not poll.done():
                await asyncio.wait([poll, *self._running.values()], return_when=asyncio.FIRST_COMPLETED)
                self._reap()
            return poll.result()
        finally:
            poll.cancel()

    def _reap(self) -> None:
        """Let go of attempts that ended, and raise what one raised."""
        for attempt_id in [attempt_id for attempt_id, task in self._running.items() if task.done()]:
            self._running.pop(attempt_id).result()

    def _start(self, rollout: Rollout) -> None:
        assert rollout.attempt is not None, "a dequeued rollout has an attempt"
        attempt_id = rollout.attempt.attempt_id
        if attempt_id in self._running:
            return  # the store answered a second time what it had answered before
        if self._left is not None:
            self._left -= 1
        self._running[attempt_id] = asyncio.create_task(self._run(rollout, attempt_id))

    async def _wait_while(self, holds: Callable[[], bool]) -> None:
        """Wait for running attempts while a condition holds, and raise what a finished one raised."""
        while True:
            self._reap()
            if not holds():
                return
            await asyncio.wait(self._running.values(), return_when=asyncio.FIRST_COMPLETED)

    async def _run(self, rollout: Rollout, attempt_id: str) -> None:
        taken, before = rollout.model_copy(), _note(rollout)  # the agent may do anything with its own copy
        resources = await self._resources_of(rollout)
        with self._bench.tracer.attempt(rollout) as trace:
            self._traces[attempt_id] = trace
            try:
                outcome = await execute(self._bench, rollout, resources, trace)
            except asyncio.CancelledError:
                if attempt_id not in self._over:
                    raise  # the runner itself is stopped
                outcome = CANCELLED
        del self._traces[
            attempt_id
        ]  # from here on the attempt is being decided, and is not cancelled any more
        self._over.discard(attempt_id)
        trace.close()
        try:
            after = _note(rollout)
        except Exception as error:  # what the agent noted is as much its own as what it raises
            after, outcome = before, outcome if outcome.failure else Outcome("failed", describe(error))
        last = [self._finish(taken, outcome, trace)]
        if (
            after != before and outcome is not CANCELLED
        ):  # the agent or a hook noted something; it travels in the same message
            last.insert(0, self._store.update_rollout(taken.rollout_id, metadata=rollout.metadata))
        await asyncio.gather(*last)

    async def _finish(self, rollout: Rollout, outcome: Outcome, trace: AttemptTrace) -> Rollout:
        """Store the attempt's last spans and decide it."""
        spans = trace.take()
        try:
            return await self._store.finish_attempt(
                rollout, outcome.status, outcome.failure, spans, _dropped(trace)
            )
        except SpanError:
            spans = _without_unstorable(trace, spans)
            return await self._store.finish_attempt(
                rollout, outcome.status, outcome.failure, spans, _dropped(trace)
            )

    async def _resources_of(self, rollout: Rollout) -> NamedResources:
        """The rollout's resources, fetched once for each version; a newer one than the rollout knew of will do."""
        if rollout.resources_id is None:
            return {}
        async with self._fetching:  # else each rollout of a batch would fetch a new version for itself
            found = self._resources.get(rollout.resources_id)
            if found is None or found.version < (rollout.resources_version or 0):
                found = await self._store.get_resources_by_id(rollout.resources_id)
                self._resources.pop(rollout.resources_id, None)
                self._resources[rollout.resources_id] = found
                if len(self._resources) > KEPT_RESOURCES:
                    del self._resources[next(iter(self._resources))]
            return found.resources

    # chores

    async def _every(self, seconds: float, chore: Callable[[], Awaitable[None]]) -> None:
        """Do something again and again, until cancelled."""
        never = asyncio.Event()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(never.wait(), seconds)
            await chore()

    async def _flush(self) -> None:
        await asyncio.gather(*(self._send(trace) for trace in self._traces.values()))

    async def _send(self, trace: AttemptTrace) -> None:
        spans = trace.take()
        try:
            if spans:
                await self._store.add_many_spans(spans)
        except SpanError:
            await self._store.add_many_spans(_without_unstorable(trace, spans))

    async def _heartbeats(self) -> None:
        await self._heartbeat()
        lease = await self._store.lease_seconds()
        await self._every(min(self._heartbeat_s, lease / HEARTBEATS_PER_LEASE), self._heartbeat)

    async def _heartbeat(self) -> None:
        stats = {
            "cpu_percent": self._process.cpu_percent(),
            "memory_bytes": self._process.memory_info().rss,
            "rollouts": [trace.rollout_id for trace in self._traces.values()],
            "abandoned": self._threads.abandoned,
        }
        for attempt_id in await self._store.heartbeat(self.worker_id, stats, list(self._running)):
            # one without a trace is being decided already, and one that is over already is being cancelled
            if attempt_id in self._traces and attempt_id not in self._over:
                self._over.add(attempt_id)
                self._running[attempt_id].cancel()


def _note(rollout: Rollout) -> bytes:
    """The rollout's metadata, to see whether something was noted in it.

    Raises:
        TypeError: it is no dict any more, or its keys are no names.
    """
    noted: Any = rollout.metadata
    if not isinstance(noted, dict) or not all(isinstance(key, str) for key in noted):
        raise TypeError(f"rollout.metadata must stay a dict whose keys are strings; it is now {noted!r:.80}")
    return pickled(noted)


def _dropped(trace: AttemptTrace) -> dict[str, int] | None:
    """What the attempt's metadata says of spans that are not in the store."""
    return {"spans_dropped": trace.dropped} if trace.dropped else None


def _without_unstorable(trace: AttemptTrace, spans: list[Span]) -> list[Span]:
    """The spans that the store takes; of the others the trace keeps count."""
    storable = []
    for span in spans:
        try:
            span_row(span)
        except SpanError as error:
            logger.warning("rollout %s: %s", trace.rollout_id, error)
            trace.dropped += 1
        else:
            storable.append(span)
    return storable
