"""Token-exact capture: every call of an attempt is announced to the store, sampled, and recorded.

Laws: a call is known to the store before its answer leaves, so that a lost record is noticed and never mistaken for silence; the
record itself travels off the request's path; the buffer is bounded and a full one makes new calls wait.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from raylight.semconv import AGENT_NAME, CALL_ID
from raylight.serving.engine import Engine, Sampled, SamplingParams
from raylight.types import Attributes, CallKey, Generation, Span

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Scope:
    """The attempt that the current request belongs to."""

    rollout_id: str
    attempt_id: str
    agent: str | None = None
    """The agent that calls, if its URL names one."""


@dataclass(frozen=True)
class CallInfo:
    """What a dialect knows of a call, beside its tokens."""

    span_name: str
    attributes: Callable[[Sampled], Attributes]
    """The span's attributes, once the answer is there."""
    call_id: str = field(default_factory=lambda: uuid.uuid4().hex)


SCOPE: ContextVar[Scope | None] = ContextVar("raylight_scope", default=None)

Opened = tuple[CallKey, float]
Closed = tuple[CallKey, Generation | None, Span | None]
Sink = Callable[[list[Opened], list[Closed]], Awaitable[None]]


class Recorder:
    """Sends what was opened and closed to a sink, in batches, one at a time.

    Args:
        sink: takes the opened calls and the closed ones; normally `StoreClient.capture`.
        capacity: calls that may be open or unsent at once; a further one waits.
    """

    def __init__(self, sink: Sink, capacity: int = 10_000) -> None:
        self._sink = sink
        self._room = asyncio.Semaphore(capacity)
        self._opened: list[tuple[Opened, asyncio.Future[None]]] = []
        self._closed: list[Closed] = []
        self._wake = asyncio.Event()
        self._sender: asyncio.Task[None] | None = None

    async def open(self, key: CallKey, start: float) -> asyncio.Future[None]:
        """Announce a call; the future is done when the store knows it."""
        await self._room.acquire()
        known: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opened.append(((key, start), known))
        self._notify()
        return known

    def close(self, key: CallKey, generation: Generation | None, span: Span | None) -> None:
        """Hand over a call's record; returns at once."""
        self._closed.append((key, generation, span))
        self._notify()

    def _notify(self) -> None:
        self._wake.set()
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_forever())

    async def _send_forever(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            opened, self._opened = self._opened, []
            closed, self._closed = self._closed, []
            try:
                await self._sink([call for call, _ in opened], closed)
            except Exception as error:  # the store is gone: who waits hears of it, and the rollouts fail as infrastructure
                logger.exception("the store did not take %d opened and %d closed calls", len(opened), len(closed))
                for _, known in opened:
                    if not known.done():
                        known.set_exception(error)
            else:
                for _, known in opened:
                    if not known.done():
                        known.set_result(None)
            for _ in closed:
                self._room.release()


class CapturingEngine:
    """An engine whose calls inside an attempt's scope are recorded. Everything else passes through unchanged."""

    def __init__(self, engine: Engine, recorder: Recorder, clock: Callable[[], float] = time.time) -> None:
        self.inner = engine
        self.model = engine.model
        self.tokenizer = engine.tokenizer
        self.max_model_len = engine.max_model_len
        self._recorder = recorder
        self._clock = clock

    async def generate(self, prompt_ids: list[int], params: SamplingParams, call: CallInfo) -> Sampled:
        """Sample one response; inside an attempt's scope the store knows of the call before this returns."""
        scope = SCOPE.get()
        if scope is None:
            return await self.inner.generate(prompt_ids, params)
        key = CallKey(scope.rollout_id, scope.attempt_id, call.call_id)
        start = self._clock()
        known = await self._recorder.open(key, start)
        generation = span = None
        try:
            sampled = await self.inner.generate(prompt_ids, params)
            generation = self._record(key, start, prompt_ids, sampled, params, scope.agent)
            span = _span(key, generation, call.span_name, call.attributes(sampled))
        finally:
            self._recorder.close(key, generation, span)
        await known
        return sampled

    def _record(
        self, key: CallKey, start: float, prompt_ids: list[int], sampled: Sampled, params: SamplingParams, agent: str | None
    ) -> Generation:
        return Generation(
            key=key, model=self.model, prompt_ids=prompt_ids, output_ids=sampled.output_ids, logprobs=sampled.logprobs,
            weight_versions=sampled.weight_versions, finish_reason=sampled.finish_reason, start_time=start,
            end_time=self._clock(), sampling=vars(params), agent=agent,
        )  # fmt: skip


def _span(key: CallKey, generation: Generation, name: str, attributes: Attributes) -> Span:
    """The span of a call. It names its generation, whose tokens the store adds when the span is read."""
    named = {CALL_ID: key.call_id} | ({AGENT_NAME: generation.agent} if generation.agent else {})
    return Span.from_attributes(
        name=name, attributes=attributes | named, rollout_id=key.rollout_id, attempt_id=key.attempt_id, span_id=key.call_id[:16],
        trace_id=key.call_id, start_time=generation.start_time, end_time=generation.end_time,
    )  # fmt: skip
