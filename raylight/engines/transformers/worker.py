"""Thread that decodes batches and executes requests and commands of the engine.

It takes requests and commands only between two decoding steps, so that every token is sampled from exactly
one weight version.
"""

from __future__ import annotations

import asyncio
import logging
import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

from raylight.engines.candidates import find_candidates
from raylight.engines.grammar import mask_logits
from raylight.engines.transformers.decoder import Decoder
from raylight.engines.transformers.sampling import adjust_logits, distribution, draw
from raylight.engines.transformers.sequence import Sequence, notify
from raylight.http.errors import RequestError, UnknownModelError
from raylight.types import FinishReason, TokenSets

CLOSED = "the engine is shutting down"
PREFILL_TOKENS = 8192
"""Most tokens of one prefill pass, padding included."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Command(Generic[T]):
    """An action to run between two decoding steps."""

    action: Callable[[], T]
    future: asyncio.Future[T]
    when_idle: bool
    """True: run when everything submitted before has ended; everything submitted later waits behind it."""


class EngineWorker:
    """Decodes sequences on a separate thread.

    Args:
        stop_ids: tokens that end a response.
        seed: seed for sequences that set no seed.
    """

    def __init__(self, decoder: Decoder, stop_ids: frozenset[int], seed: int) -> None:
        self.decoder = decoder
        self.version = 0
        self.asleep = False
        self.updating = False
        """True while the weights are incomplete."""
        self.closed = False
        self._stop_ids = stop_ids
        self._generator = torch.Generator(decoder.device).manual_seed(seed)
        self._inbox: queue.SimpleQueue[Sequence | Command[object] | None] = queue.SimpleQueue()
        self._deferred: deque[Sequence | Command[object]] = deque()
        """A command that waits until the engine is idle, and everything submitted after it."""
        self._waiting: deque[Sequence] = deque()
        self._alone = 0
        """Number of waiting sequences, the first ones, that are prefilled alone: their batch failed."""
        self.thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self.thread.start()

    # called from any event loop

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue sequences for decoding."""
        for sequence in sequences:
            self._inbox.put(sequence)

    async def run(self, action: Callable[[], T], when_idle: bool = False) -> T:
        """Run `action` on the engine's thread between two steps, and return its result.

        Raises:
            RequestError: the engine is closed.
        """
        if self.closed:
            raise RequestError(CLOSED, 503, "overloaded_error")
        command = Command(action, asyncio.get_running_loop().create_future(), when_idle)
        self._inbox.put(command)
        return await command.future

    def close(self, timeout_s: float | None) -> None:
        """End the thread; sequences and commands that are left fail.

        Args:
            timeout_s: seconds to wait for the step or action in progress; None for no limit.
        """
        self.closed = True
        self._inbox.put(None)
        self.thread.join(timeout_s)

    # for actions, on the engine's thread

    def recompute(self) -> None:
        """Discard the cache after a weight update; sequences in flight are prefilled again."""
        self._waiting.extendleft(reversed(self.decoder.clear()))

    def abort(self, adapter: str | None) -> None:
        """End sequences in flight immediately, of one adapter or all if None."""
        in_flight = [*self.decoder.active, *self._waiting]
        aborted = [s for s in in_flight if adapter is None or s.adapter_name == adapter]
        for sequence in aborted:
            self._remove(sequence)
        self._end(aborted)

    def unload_unused(self) -> None:
        """Free the adapter versions that are neither served nor used by a sequence."""
        self.decoder.adapters.unload(s.adapter for s in [*self.decoder.active, *self._waiting])

    # the loop

    def _loop(self) -> None:
        with torch.inference_mode():
            while self._read_inbox():
                try:
                    self._drop_cancelled()
                    if not (self.asleep or self.updating):
                        self._prefill()
                        self._decode()
                except BaseException as error:  # of any kind, a panic of the tokenizer too: every caller that
                    # waits for this step must receive it, and the thread must go on
                    logger.exception("a step of the engine failed")
                    reason = f"the engine failed: {type(error).__name__}: {error}"
                    self._fail_all(RequestError(reason, 500, "server_error"))
                self._release_deferred()
        while not self._inbox.empty():  # messages that arrived while the thread was closing
            self._read_inbox()
        self._fail_all(RequestError(CLOSED, 503, "overloaded_error"))

    @property
    def _busy(self) -> bool:
        return bool(self.decoder.active or self._waiting)

    def _read_inbox(self) -> bool:
        """Handle all messages; wait for one if there is nothing to compute.

        Returns False once the engine closes.
        """
        block = self.asleep or self.updating or not self._busy
        while True:
            try:
                message = self._inbox.get(block=block)
            except queue.Empty:
                return True
            block = False
            if message is None:
                return False
            self._deferred.append(message) if self._deferred else self._handle(message)

    def _handle(self, message: Sequence | Command[object]) -> None:
        if isinstance(message, Sequence):
            self._waiting.append(message)
        elif message.when_idle and (self._busy or self.closed):
            self._deferred.append(message)
        else:
            _run(message)

    def _release_deferred(self) -> None:
        """Handle deferred messages once the engine is idle."""
        while self._deferred and not self._busy:
            deferred, self._deferred = self._deferred, deque()
            for message in deferred:
                self._deferred.append(message) if self._deferred else self._handle(message)

    def _prefill(self) -> None:
        """Admit as many waiting sequences as slots and one pass allow, and sample their next tokens."""
        admitted: list[Sequence] = []
        known = set[tuple[str | None, bytes]]()  # equal sequences are computed once
        longest = 0
        while self._waiting and len(self.decoder.active) + len(admitted) < self.decoder.slots:
            sequence = self._waiting[0]
            known.add((sequence.adapter_name, sequence.compared_ids.tobytes()))
            longest = max(longest, self.decoder.count_missing(sequence))
            if admitted and (self._alone or longest * len(known) > PREFILL_TOKENS):
                break
            self._alone = max(self._alone - 1, 0)
            self._waiting.popleft()
            if self._assign_adapter(sequence):
                admitted.append(sequence)
        if admitted and (logits := self._prefill_batch(admitted)) is not None:
            self._append(admitted, logits)

    def _prefill_batch(self, admitted: list[Sequence]) -> torch.Tensor | None:
        """Prefill a batch. If that raises, a single sequence has failed; several wait for a pass each."""
        try:
            return self.decoder.prefill(admitted)
        except Exception as error:  # of any kind; the cache of the other sequences is not touched
            for sequence in admitted:
                self.decoder.remove(sequence)
            if len(admitted) == 1:
                self._end(admitted, error=sequence_error(error))
            else:
                self._waiting.extendleft(reversed(admitted))
                self._alone = len(admitted)
            return None

    def _assign_adapter(self, sequence: Sequence) -> bool:
        """Assign the current version of its adapter to a new sequence.

        Returns False, and ends it, if there is none any more.
        """
        name = sequence.adapter_name
        if name is not None and sequence.adapter is None:
            sequence.adapter = self.decoder.adapters.find(name)
            if sequence.adapter is None:
                self._end([sequence], error=UnknownModelError(name))
                return False
        return True

    def _decode(self) -> None:
        """Sample one more token for every active sequence."""
        if self.decoder.active:
            self._append(list(self.decoder.active), self.decoder.decode())

    def _append(self, sequences: list[Sequence], logits: torch.Tensor) -> None:
        """Sample a token for each sequence, end those that are complete, and notify their readers."""
        step = batch_step(sequences, logits, self._stop_ids)
        for sequence, error in step.failed:
            self._fail(sequence, error)
        sequences = step.sequences
        if not sequences:
            return
        params, generators = [s.params for s in sequences], [s.generator for s in sequences]
        sampled = draw(step.logprobs, params, generators, self._generator, step.policy_logits)
        keeping = [row for row, s in enumerate(sequences) if s.sample.keeps_candidates]
        candidates: dict[int, TokenSets] = {}
        if keeping:
            found = find_candidates(step.logprobs[keeping])
            candidates = dict(zip(keeping, found.split([1] * len(keeping)), strict=True))
        ended: list[Sequence] = []
        for row, (sequence, token, logprob) in enumerate(
            zip(sequences, sampled.tokens, sampled.logprobs, strict=True)
        ):
            if not math.isfinite(logprob):
                self._fail(sequence, _not_finite_error(sequence))
                continue
            if sequence.params.top_logprobs:
                sequence.top_logprobs.append(sampled.top_logprobs[row][: sequence.params.top_logprobs])
            try:
                if self._add_token(sequence, token, logprob, sampled.allowed.get(row), candidates.get(row)):
                    ended.append(sequence)
            except BaseException as error:  # of any kind, a panic of the tokenizer too
                self._fail(sequence, sequence_error(error))
        for sequence in ended:
            self.decoder.retire(sequence)
        self._end(ended, also=[s for s in sequences if s.streams and not s.ended])

    def _add_token(
        self,
        sequence: Sequence,
        token: int,
        logprob: float,
        allowed: tuple[int, float] | None,
        candidates: TokenSets | None,
    ) -> bool:
        """Add a sampled token to its sequence; returns True if that completes or cancels it."""
        if sequence.grammar_matcher is not None:
            sequence.grammar_matcher.accept_token(token)
        version = sequence.adapter.version if sequence.adapter else self.version
        sequence.append(token, logprob, version, allowed, candidates)
        return sequence.cancelled or self._is_complete(sequence)

    def _is_complete(self, sequence: Sequence) -> bool:
        """Check the last token of a sequence; sets the finish reason if the sequence is complete."""
        params, stop_words = sequence.params, sequence.stop_words
        token = sequence.sample.output_ids[-1]
        reason: FinishReason | None = None
        if stop_words is not None:
            stop_words.feed([token])
        stopped = (stop_words is not None and stop_words.stopped) or token in params.stop_token_ids
        if stopped or (token in self._stop_ids and not params.ignore_eos):
            reason = "stop"
        elif sequence.count >= params.max_tokens:
            reason = "length"
        if reason is None:
            return False
        sequence.sample.finish_reason = reason
        return True

    # ends of sequences

    def _fail(self, sequence: Sequence, error: RequestError) -> None:
        self.decoder.remove(sequence)
        self._end([sequence], error=error)

    def _remove(self, sequence: Sequence) -> None:
        self.decoder.remove(sequence) if sequence in self.decoder.active else self._waiting.remove(sequence)

    def _drop_cancelled(self) -> None:
        cancelled = [s for s in [*self.decoder.active, *self._waiting] if s.cancelled]
        for sequence in cancelled:
            self._remove(sequence)
        self._end(cancelled)

    def _fail_all(self, error: Exception) -> None:
        failed = self.decoder.clear() + list(self._waiting)
        self._waiting.clear()
        if self.closed:
            failed += [m for m in self._deferred if isinstance(m, Sequence)]
            for command in self._deferred:
                if isinstance(command, Command):
                    _resolve(command.future, error)
            self._deferred.clear()
        self._end(failed, error=error)

    def _end(
        self, ended: list[Sequence], error: Exception | None = None, also: list[Sequence] | None = None
    ) -> None:
        """Mark removed sequences as ended; notify their readers, and the readers of `also` of a new token."""
        for sequence in ended:
            sequence.error = error
            sequence.ended = True
        if ended:
            self.unload_unused()
        notify([*ended, *(also or ())])


def _not_finite_error(sequence: Sequence) -> RequestError:
    """The error of a sequence without a possible next token.

    A log-prob that is not finite must never reach a learner.
    """
    if sequence.grammar_matcher is not None or sequence.params.adjusts_logits:
        return RequestError("no token is possible under this request's grammar, bias or penalties")
    return RequestError(
        "the model's log-probabilities are not finite; its weights are broken", 500, "server_error"
    )


def _run(command: Command[Any]) -> None:
    if command.future.cancelled():  # the caller gave up
        return
    try:
        result = command.action()
    except Exception as error:  # raised again in the caller
        result = error
    _resolve(command.future, result)


def _resolve(future: asyncio.Future[object], result: object) -> None:
    """Resolve a future from the engine's thread."""
    loop = future.get_loop()
    if not loop.is_closed():  # a closed loop has no waiters
        loop.call_soon_threadsafe(_set, future, result)


def _set(future: asyncio.Future[object], result: object) -> None:
    if not future.done():
        future.set_exception(result) if isinstance(result, Exception) else future.set_result(result)


@dataclass(frozen=True)
class BatchStep:
    """Sequences, and the distributions of their next tokens.

    Attributes:
        logprobs: shape (rows, vocabulary).
        policy_logits: the logits without the rows' constraints; None if no row has one.
        failed: sequences without a distribution, each with its error.
    """

    sequences: list[Sequence]
    logprobs: torch.Tensor
    policy_logits: torch.Tensor | None
    failed: list[tuple[Sequence, RequestError]]


def batch_step(sequences: list[Sequence], logits: torch.Tensor, stop_ids: Iterable[int]) -> BatchStep:
    """Apply each sequence's grammar, bias, penalties, temperature and truncation to its row.

    If that raises, every row is tried alone, and those that raise again have failed.

    Args:
        logits: shape (rows, vocabulary).
        stop_ids: tokens that end a response.

    Raises:
        Exception: no row raises alone, so that no sequence is the cause.
    """
    try:
        return BatchStep(sequences, *_distributions(sequences, logits, stop_ids), [])
    except Exception:
        errors = [_error_of(s, logits[row : row + 1], stop_ids) for row, s in enumerate(sequences)]
        if not any(errors):
            raise
    rows = [row for row, error in enumerate(errors) if error is None]
    kept = [sequences[row] for row in rows]
    failed = [(s, error) for s, error in zip(sequences, errors, strict=True) if error is not None]
    if not kept:
        return BatchStep([], logits[:0], None, failed)
    return BatchStep(kept, *_distributions(kept, logits[rows], stop_ids), failed)


def sequence_error(error: BaseException) -> RequestError:
    """Return the error of a sequence that failed alone, and log its cause."""
    logger.error("a sequence failed; the others of its batch go on", exc_info=error)
    return RequestError(f"the engine failed: {type(error).__name__}: {error!s:.500}", 500, "server_error")


def _error_of(sequence: Sequence, logits: torch.Tensor, stop_ids: Iterable[int]) -> RequestError | None:
    try:
        _distributions([sequence], logits, stop_ids)
    except Exception as error:  # of any kind: the request's own values caused it
        return sequence_error(error)
    return None


def _distributions(
    sequences: list[Sequence], logits: torch.Tensor, stop_ids: Iterable[int]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return log-probs, and the logits without constraints if a row has one; shapes (rows, vocabulary)."""
    params = [s.params for s in sequences]
    policy_logits = logits if any(p.constrained for p in params) else None
    if any(s.grammar_matcher is not None for s in sequences):
        logits = mask_logits(logits, [s.grammar_matcher for s in sequences])
    if any(p.adjusts_logits for p in params):
        histories = [(s.sample.prompt_ids, s.sample.output_ids) for s in sequences]
        logits = adjust_logits(logits, params, histories, stop_ids)
    return distribution(logits, params), policy_logits
