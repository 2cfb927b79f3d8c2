"""The thread that computes: it takes up requests and commands between two decoding steps, so that a token is produced by exactly
one weight version.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from raylight.engines.transformers.decoder import Decoder
from raylight.engines.transformers.grammar import allow
from raylight.engines.transformers.sampling import adjust, sample
from raylight.engines.transformers.sequence import Sequence, wake
from raylight.http.errors import RequestError
from raylight.types import FinishReason

CLOSED = "the engine is shutting down"
PREFILL_TOKENS = 8192
"""Padded tokens of one prefill pass."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Command(Generic[T]):
    """Something to do between two steps."""

    action: Callable[[], T]
    future: asyncio.Future[T]
    after_all: bool
    """Only when all that came before has ended; what comes later waits behind it."""


class Worker:
    """Decodes sequences in a thread of its own.

    Args:
        stop_ids: tokens that end a response.
        seed: of the sequences without one of their own.
    """

    def __init__(self, decoder: Decoder, stop_ids: frozenset[int], seed: int) -> None:
        self.decoder = decoder
        self.version = 0
        self.asleep = False
        self.closed = False
        self._stop_ids = stop_ids
        self._random = torch.Generator(decoder.device).manual_seed(seed)
        self._inbox: queue.SimpleQueue[Sequence | Command[Any] | None] = queue.SimpleQueue()
        self._held: deque[Sequence | Command[Any]] = deque()
        """A command that waits for the end of all before it, and what came after it."""
        self._waiting: deque[Sequence] = deque()
        self.thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self.thread.start()

    # from any event loop

    def submit(self, sequences: list[Sequence]) -> None:
        for sequence in sequences:
            self._inbox.put(sequence)

    async def do(self, action: Callable[[], T], after_all: bool = False) -> T:
        """Run `action` in the engine's thread between two steps.

        Raises:
            RequestError: the engine is closed.
        """
        if self.closed:
            raise RequestError(CLOSED, 503, "overloaded_error")
        command = Command(action, asyncio.get_running_loop().create_future(), after_all)
        self._inbox.put(command)
        return await command.future

    def close(self) -> None:
        self.closed = True
        self._inbox.put(None)
        self.thread.join(timeout=10)

    # actions, within the engine's thread

    def recompute(self) -> None:
        """The weights are new: what the old ones left in the cache is computed again, the sequences' own tokens included."""
        self._waiting.extendleft(reversed(self.decoder.clear()))

    def abort(self, model: str | None) -> None:
        """End the sequences in flight at once: those of an adapter, or (None) all."""
        chosen = [s for s in [*self.decoder.active, *self._waiting] if model is None or s.model == model]
        for sequence in chosen:
            self._leave(sequence)
        self._end(chosen)

    def unload_unused(self) -> None:
        """Free the adapters that are neither served nor used any more."""
        self.decoder.adapters.unload(s.adapter for s in [*self.decoder.active, *self._waiting])

    # the loop

    def _work(self) -> None:
        with torch.inference_mode():
            while self._take_messages():
                try:
                    self._drop_cancelled()
                    if not self.asleep:
                        self._prefill()
                        self._decode()
                except (
                    Exception
                ) as error:  # whatever broke, the callers that wait for this step must hear of it
                    logger.exception("a pass of the engine failed")
                    self._fail_all(
                        RequestError(
                            f"the engine failed: {type(error).__name__}: {error}", 500, "server_error"
                        )
                    )
                self._release_held()
        while not self._inbox.empty():  # what came between the last look and the closing
            self._take_messages()
        self._fail_all(RequestError(CLOSED, 503, "overloaded_error"))

    @property
    def _busy(self) -> bool:
        return bool(self.decoder.active or self._waiting)

    def _take_messages(self) -> bool:
        """Take what has arrived; wait if there is nothing to compute. False once the engine closes."""
        block = self.asleep or not self._busy
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if message is None:
                return False
            self._held.append(message) if self._held else self._handle(message)

    def _handle(self, message: Sequence | Command[Any]) -> None:
        if isinstance(message, Sequence):
            self._waiting.append(message)
        elif message.after_all and (self._busy or self.closed):
            self._held.append(message)
        else:
            _run(message)

    def _release_held(self) -> None:
        """Go on with what waited for the end of all before it."""
        while self._held and not self._busy:
            held, self._held = self._held, deque()
            for message in held:
                self._held.append(message) if self._held else self._handle(message)

    def _prefill(self) -> None:
        """Admit as many waiting sequences as slots and one pass allow, and sample their next tokens."""
        admitted: list[Sequence] = []
        longest = 0
        while self._waiting and len(self.decoder.active) + len(admitted) < self.decoder.slots:
            sequence = self._waiting[0]
            longest = max(longest, sequence.length)
            if admitted and longest * (len(admitted) + 1) > PREFILL_TOKENS:
                break
            self._waiting.popleft()
            if self._finds_adapter(sequence):
                admitted.append(sequence)
        if admitted:
            self._append(admitted, self.decoder.prefill(admitted))

    def _finds_adapter(self, sequence: Sequence) -> bool:
        """Give a sequence that begins the newest version of its adapter."""
        if sequence.model is not None and sequence.adapter is None:
            sequence.adapter = self.decoder.adapters.find(sequence.model)
            if sequence.adapter is None:
                self._end(
                    [sequence],
                    error=RequestError(
                        f"the model {sequence.model!r} is served no longer", 404, "not_found_error"
                    ),
                )
                return False
        return True

    def _decode(self) -> None:
        """One more token for every active sequence."""
        if self.decoder.active:
            self._append(list(self.decoder.active), self.decoder.decode())

    def _append(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Sample a token for each sequence, end those that are complete, and tell those who wait."""
        params = [s.params for s in sequences]
        if any(s.matcher is not None for s in sequences):
            logits = allow(logits, [s.matcher for s in sequences])
        if any(p.adjusts for p in params):
            logits = adjust(
                logits,
                params,
                [(s.sample.prompt_ids, s.sample.output_ids) for s in sequences],
                self._stop_ids,
            )
        drawn = sample(logits, params, [s.generator for s in sequences], self._random)
        lost = [s for s, logprob in zip(sequences, drawn.logprobs, strict=True) if not math.isfinite(logprob)]
        for sequence in lost:
            self.decoder.remove(sequence)
            self._end([sequence], error=_hopeless(sequence))
        for row, (sequence, token, logprob) in enumerate(
            zip(sequences, drawn.tokens, drawn.logprobs, strict=True)
        ):
            if sequence.ended:
                continue
            if sequence.params.top_logprobs:
                sequence.tops.append(drawn.tops[row][: sequence.params.top_logprobs])
            if sequence.matcher is not None:
                sequence.matcher.accept_token(token)
            sequence.append(token, logprob, sequence.adapter.version if sequence.adapter else self.version)
        ended = [s for s in sequences if not s.ended and (s.cancelled or self._is_complete(s))]
        for sequence in ended:
            self.decoder.remove(sequence)
        self._end(ended, also=[s for s in sequences if s.streams and not s.ended])

    def _is_complete(self, sequence: Sequence) -> bool:
        params, count = sequence.params, sequence.count
        token = sequence.sample.output_ids[-1]
        reason: FinishReason | None = None
        if sequence.stops is not None:
            sequence.stops.feed([token])
        stopped = sequence.stops is not None and sequence.stops.stopped
        if stopped or (token in self._stop_ids and not params.ignore_eos):
            reason = "stop"
        elif count >= params.max_tokens:
            reason = "length"
        if reason is None:
            return False
        sequence.sample.finish_reason = reason
        return True

    # the end of sequences

    def _leave(self, sequence: Sequence) -> None:
        self.decoder.remove(sequence) if sequence in self.decoder.active else self._waiting.remove(sequence)

    def _drop_cancelled(self) -> None:
        cancelled = [s for s in [*self.decoder.active, *self._waiting] if s.cancelled]
        for sequence in cancelled:
            self._leave(sequence)
        self._end(cancelled)

    def _fail_all(self, error: Exception) -> None:
        failed = self.decoder.clear() + list(self._waiting)
        self._waiting.clear()
        if self.closed:
            failed += [m for m in self._held if isinstance(m, Sequence)]
            _settle([(m.future, error) for m in self._held if isinstance(m, Command)])
            self._held.clear()
        self._end(failed, error=error)

    def _end(
        self, ended: list[Sequence], error: Exception | None = None, also: list[Sequence] | None = None
    ) -> None:
        """Sequences have left; tell those who wait for them, and those of `also` that have grown."""
        for sequence in ended:
            sequence.error = error
            sequence.ended = True
        if ended:
            self.unload_unused()
        wake([*ended, *(also or ())])


def _hopeless(sequence: Sequence) -> RequestError:
    """Why no token of a sequence has a probability. A number that is none must never reach a learner."""
    if sequence.matcher is not None or sequence.params.adjusts:
        return RequestError("no token has a probability under this request's grammar, bias or penalties")
    return RequestError(
        "the model's log-probabilities are not finite; its weights are broken", 500, "server_error"
    )


def _run(command: Command[Any]) -> None:
    if command.future.cancelled():  # who asked for it gave up
        return
    try:
        result = command.action()
    except Exception as error:  # reported to the caller
        result = error
    _settle([(command.future, result)])


def _settle(results: list[tuple[asyncio.Future[Any], Any]]) -> None:
    for future, result in results:
        loop = future.get_loop()
        if not loop.is_closed():  # else nobody waits any more
            loop.call_soon_threadsafe(_set, future, result)


def _set(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)
