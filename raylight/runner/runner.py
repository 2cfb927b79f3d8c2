"""A runner: dequeues rollouts and executes many at once. It needs only a store client and an event loop.

Laws:
- An attempt is decided after all its spans and rewards are in the store, in one transaction with the last of
  them.
- An agent never waits for the store.
- An attempt that the store reports as obsolete is cancelled.
- A runner in which too many agents hang is replaced, after its other attempts have ended.
- A runner that the store has retired takes no more rollouts, and ends after its attempts have ended.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import resource
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Literal
from urllib.parse import urlsplit

import psutil

from raylight._utils.agent_threads import AgentThreads
from raylight._utils.aio import BroadcastCondition, pause
from raylight._utils.no_proxy import bypass_proxies
from raylight.agent.hooks import HookDispatcher
from raylight.agent.litagent import LitAgent, TrainerView
from raylight.agent.resources import LLM, NamedResources
from raylight.errors import SpanError, WorkerGoneError
from raylight.experience.opponents import OPPONENT
from raylight.runner.execute import RolloutContext, execute
from raylight.runner.outcome import CANCELLED, Outcome, describe
from raylight.store.client import StoreClient
from raylight.store.payloads import decode_payload, encode_payload
from raylight.store.rows import span_row
from raylight.traces.context import SEND_BATCH, AttemptTrace
from raylight.traces.tracer import Tracer
from raylight.types import (
    DRAW,
    GREEDY,
    SOURCE,
    AttemptedRollout,
    ResourcesUpdate,
    Rollout,
    RolloutState,
    Span,
)

logger = logging.getLogger(__name__)

POLL_TIMEOUT_S = 30.0
FIRST_DEQUEUE = 8
"""Rollouts of the first dequeue after the queue was empty: few enough that runners share a small batch
evenly."""
MAX_DEQUEUE = 32
"""Maximum number of rollouts of a dequeue. It doubles from `FIRST_DEQUEUE` while the queue is long enough."""
ROOM_WAIT_S = 0.01
"""Seconds for which a runner that was full waits for the end of further attempts, so that one message
dequeues several rollouts."""
FLUSH_S = 1.0
"""Interval at which the spans of running attempts are sent."""
HEARTBEAT_S = 10.0
"""Longest interval between two heartbeats."""
HEARTBEATS_PER_LEASE = 4
MAX_HUNG_AGENTS = 16
"""Number of abandoned agents with which a runner takes no more rollouts, and is replaced."""
MAX_RESOURCES = 8
"""Versions of the named resources that a runner caches."""
RUN_KEYS = (DRAW, GREEDY, OPPONENT, SOURCE)
"""Metadata keys that a run reads again: an agent or a hook cannot change what the run has set."""

RunnerExit = Literal["hung_agents", "max_rollouts", "retired", "limited"]
"""Reason why a runner ended by itself: too many agents hang in it, it has executed `max_rollouts`, the store
leases nothing more to it, or an agent has limited its process for good."""
LIMITS = tuple({getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")})
"""Limits of a process on its resources, which an agent that runs in it can change."""


class Runner:
    """Executes rollouts until it is cancelled.

    Args:
        worker_id: id of this runner in the store.
        max_concurrent: rollouts executed at once.
        secret: secret of the run, from which each attempt's API key is derived.
        max_rollouts: rollouts after which it ends; None for no limit.
        heartbeat_s: seconds between two heartbeats; fewer if the store's leases are short.
        trainer: settings of the Trainer, for the agent.
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
        trainer: TrainerView | None = None,
    ) -> None:
        self.worker_id = worker_id
        self.tracer = tracer
        self._store = store
        self._threads = AgentThreads()
        self._context = RolloutContext(
            agent, tracer, hooks, secret, self._threads, time.time, runner=self, trainer=trainer
        )
        self._max_concurrent = max_concurrent
        self._remaining = max_rollouts
        self._retired = False
        self._heartbeat_s = heartbeat_s
        self._resources: dict[str, ResourcesUpdate] = {}
        self._fetching = asyncio.Lock()
        self._running: dict[str, asyncio.Task[None]] = {}
        """Tasks of the running attempts, by attempt id."""
        self._attempt_ended = BroadcastCondition()
        self._error: asyncio.Future[None] | None = None
        """First error with which the task of an attempt ended; it ends the runner."""
        self._traces: dict[str, AttemptTrace] = {}
        self._obsolete: set[str] = set()
        """Running attempts that are being cancelled because the store reported them as obsolete."""
        self._process = psutil.Process()
        self._limits = {limit: resource.getrlimit(limit) for limit in LIMITS}
        self._is_limited = False

    @property
    def running(self) -> int:
        """Number of attempts that are being executed."""
        return len(self._running)

    def get_agent(self) -> LitAgent:
        return self._context.agent

    def get_store(self) -> StoreClient:
        """Return the store's client, for hooks and agents."""
        return self._store

    async def serve(self) -> RunnerExit:
        """Dequeue and execute rollouts until this runner ends by itself; raises when the store is gone."""
        self._context.tracer.setup()
        self._error = asyncio.get_running_loop().create_future()
        loops = [
            self._error,
            *(
                asyncio.create_task(work)
                for work in (self._dequeue_rollouts(), self._repeat(FLUSH_S, self._flush), self._heartbeats())
            ),
        ]
        try:
            await asyncio.wait(loops, return_when=asyncio.FIRST_COMPLETED)
            for loop in loops:
                if loop.done():
                    loop.result()
            if self._retired or self._is_limited:
                return "retired" if self._retired else "limited"
            return "max_rollouts" if self._remaining == 0 else "hung_agents"
        finally:
            tasks = [*loops, *self._running.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self._context.tracer.teardown)

    async def _dequeue_rollouts(self) -> None:
        """Dequeue rollouts while there is capacity; returns when this runner takes no more and its attempts
        have ended."""
        most = FIRST_DEQUEUE
        while True:
            await self._wait_for_room()
            if self._remaining == 0 or self._threads.abandoned >= MAX_HUNG_AGENTS:
                break
            limit = min(self._max_concurrent - len(self._running), most, self._remaining or most)
            try:
                rollouts = await self._store.dequeue_many_rollouts(
                    limit=limit, worker_id=self.worker_id, timeout=POLL_TIMEOUT_S
                )
            except WorkerGoneError:
                self._retired = True
                break
            most = min(2 * most, MAX_DEQUEUE) if len(rollouts) == limit else FIRST_DEQUEUE
            for rollout in rollouts:
                self._start(rollout)
        await self._attempt_ended.wait_for(lambda: not self._running)

    async def _wait_for_room(self) -> None:
        """Wait until another attempt can run, and for a moment until a sixteenth of the attempts can."""

        def has_room(share: int) -> bool:
            return len(self._running) <= self._max_concurrent - share

        await self._attempt_ended.wait_for(lambda: has_room(1))
        await self._attempt_ended.wait_for(lambda: has_room(self._max_concurrent // 16), ROOM_WAIT_S)

    def _start(self, rollout: AttemptedRollout) -> None:
        attempt_id = rollout.attempt.attempt_id
        if attempt_id in self._running:
            return  # the store repeated a response
        if self._remaining is not None:
            self._remaining -= 1
        task = self._running[attempt_id] = asyncio.create_task(self.run_attempt(rollout))
        task.add_done_callback(functools.partial(self._end, attempt_id))

    def _end(self, attempt_id: str, task: asyncio.Task[None]) -> None:
        """Remove the task of an attempt that ended, and end the runner if it ended with an error."""
        del self._running[attempt_id]
        self._attempt_ended.notify_all()
        if self._error is None or self._error.done():
            return
        if task.cancelled():
            self._error.cancel()
        elif error := task.exception():
            self._error.set_exception(error)
        elif not self._restore_limits():
            self._is_limited = True
            self._error.set_result(None)

    def _restore_limits(self) -> bool:
        """Undo an agent's changes of this process's limits; False if it has lowered one for good."""
        try:
            for limit, values in self._limits.items():
                if resource.getrlimit(limit) != values:
                    resource.setrlimit(limit, values)
        except (OSError, ValueError):  # the hard limit is raised by root only
            return False
        return True

    async def run_attempt(self, rollout: AttemptedRollout) -> None:
        """Execute an attempt and decide it."""
        attempt_id = rollout.attempt.attempt_id
        original, before = rollout.model_copy(), _encoded_metadata(rollout)  # the agent may change its copy
        resources = await self._resources_of(rollout)
        with self._context.tracer.attempt(rollout) as trace:
            self._traces[attempt_id] = trace
            try:
                find_truncation = self._store.find_truncation
                outcome = await execute(self._context, rollout, resources, trace, find_truncation)
            except asyncio.CancelledError:
                if attempt_id not in self._obsolete:
                    raise  # the runner itself is stopped
                outcome = CANCELLED
        del self._traces[attempt_id]  # from here on the attempt is decided, and no longer cancelled
        self._obsolete.discard(attempt_id)
        trace.close()
        try:
            after = _encoded_metadata(rollout)
        except Exception as error:  # wrong metadata is a failure of the agent
            after, outcome = before, outcome if outcome.failure else Outcome("failed", describe(error))
        if after != before:
            kept = {key: value for key, value in decode_payload(before).items() if key in RUN_KEYS}
            outcome = replace(outcome, metadata=rollout.metadata | kept)
        await self._finish(original, outcome, trace)

    async def _finish(self, rollout: Rollout, outcome: Outcome, trace: AttemptTrace) -> RolloutState:
        """Store the attempt's last spans and decide it. An attempt that lost a reward fails."""
        spans = trace.take(SEND_BATCH)
        while len(spans) == SEND_BATCH:  # the last ones go with the decision
            await self._store_spans(trace, spans)
            spans = trace.take(SEND_BATCH)
        try:
            return await self._decide(rollout, outcome, trace, spans)
        except SpanError:
            return await self._decide(rollout, outcome, trace, _without_unstorable(trace, spans))

    async def _decide(
        self, rollout: Rollout, outcome: Outcome, trace: AttemptTrace, spans: list[Span]
    ) -> RolloutState:
        if outcome.status == "succeeded" and (lost := trace.reward_error):
            outcome = replace(outcome, status="failed", failure=describe(lost))
        return await self._store.finish_attempt(
            rollout,
            outcome.status,
            outcome.failure,
            spans,
            losses=trace.losses,
            truncated=outcome.truncated,
            rollout_metadata=outcome.metadata,
        )

    async def _resources_of(self, rollout: Rollout) -> NamedResources:
        """Resources of a rollout, fetched once for each version, or a newer version of them."""
        if rollout.resources_id is None:
            return {}
        async with self._fetching:  # otherwise each rollout of a batch would fetch a new version
            cached = self._resources.get(rollout.resources_id)
            if cached is None or cached.version < (rollout.resources_version or 0):
                cached = await self._store.get_resources_by_id(rollout.resources_id)
                _call_directly(cached.resources)
                self._resources.pop(rollout.resources_id, None)
                self._resources[rollout.resources_id] = cached
                if len(self._resources) > MAX_RESOURCES:
                    del self._resources[next(iter(self._resources))]
            return cached.resources

    # spans and heartbeats

    async def _repeat(self, seconds: float, action: Callable[[], Awaitable[None]]) -> None:
        """Call a function at an interval, until cancelled."""
        while True:
            await pause(seconds)
            await action()

    async def _flush(self) -> None:
        await asyncio.gather(*(self._send(trace) for trace in self._traces.values()))

    async def _send(self, trace: AttemptTrace) -> None:
        while spans := trace.take(SEND_BATCH):
            await self._store_spans(trace, spans)

    async def _store_spans(self, trace: AttemptTrace, spans: list[Span]) -> None:
        try:
            await self._store.add_many_spans(spans)
        except SpanError:
            await self._store.add_many_spans(_without_unstorable(trace, spans))

    async def _heartbeats(self) -> None:
        await self._heartbeat()
        lease = await self._store.lease_s()
        await self._repeat(min(self._heartbeat_s, lease / HEARTBEATS_PER_LEASE), self._heartbeat)

    async def _heartbeat(self) -> None:
        stats = {
            "cpu_percent": self._process.cpu_percent(),
            "memory_bytes": self._process.memory_info().rss,
            "rollouts": [trace.rollout_id for trace in self._traces.values()],
            "abandoned": self._threads.abandoned,
        }
        for attempt_id in await self._store.heartbeat(self.worker_id, stats, list(self._running)):
            # an attempt without a trace is being decided; an obsolete one is already being cancelled
            if attempt_id in self._traces and attempt_id not in self._obsolete:
                self._obsolete.add(attempt_id)
                self._running[attempt_id].cancel()


def _call_directly(resources: NamedResources) -> None:
    """Have this process call the models that raylight serves without a proxy."""
    served = [each for each in resources.values() if isinstance(each, LLM) and each.traced]
    if served:
        bypass_proxies(urlsplit(each.endpoint).hostname for each in served)


def _encoded_metadata(rollout: Rollout) -> bytes:
    """The rollout's metadata as bytes, which show whether the agent or a hook changed it.

    Raises:
        TypeError: it is not a dict with string keys any more.
    """
    metadata: object = rollout.metadata
    if not isinstance(metadata, dict) or not all(isinstance(key, str) for key in metadata):
        raise TypeError(f"rollout.metadata must remain a dict with string keys; it is now {metadata!r:.80}")
    return encode_payload(metadata, "rollout.metadata")


def _without_unstorable(trace: AttemptTrace, spans: list[Span]) -> list[Span]:
    """Filter the spans that can be stored; the trace counts the others as dropped."""
    storable = []
    for span in spans:
        try:
            span_row(span)
        except SpanError as error:
            logger.warning("rollout %s: %s", trace.rollout_id, error)
            trace.drop(span, str(error))
        else:
            storable.append(span)
    return storable
