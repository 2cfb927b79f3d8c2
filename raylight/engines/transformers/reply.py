"""Common parts of the responses of all routes that sample."""

from __future__ import annotations

import bisect
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from raylight.engines.capture_context import CURRENT
from raylight.engines.transformers.requests import SamplingBody
from raylight.engines.transformers.sampling import SamplingParams
from raylight.engines.transformers.sequence import Choices, Sequence
from raylight.engines.transformers.text import TextStream, Vocabulary
from raylight.http.errors import RequestError, UnknownModelError
from raylight.http.sse import sse_bytes
from raylight.types import JsonObject

if TYPE_CHECKING:
    from raylight.engines.transformers.engine import TransformersEngine

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express."""


class Reply(Protocol):
    """A response whose choices are being sampled."""

    choices: Choices
    streams: bool
    """True if the client asked for a stream."""

    async def body(self) -> JsonObject:
        """Return the whole response, once it is complete."""
        ...

    def events(self) -> AsyncIterator[JsonObject]:
        """Yield the response in chunks."""
        ...


@dataclass(frozen=True)
class Increment:
    """The new part of a choice since the last read.

    Attributes:
        first: index of its first new token.
        ids: new tokens.
        text: new text that later tokens cannot change.
        reason: finish reason in OpenAI's terms; None if the choice has not ended.
        stop_word: the stop word that ended it.
    """

    first: int
    ids: list[int]
    text: str
    reason: str | None
    stop_word: str | None

    @property
    def finish_fields(self) -> dict[str, str | None]:
        """Fields of the finish, as vLLM names them."""
        return {"finish_reason": self.reason, "stop_reason": self.stop_word}


class ChoiceReader:
    """Reads one choice incrementally."""

    def __init__(self, sequence: Sequence, vocabulary: Vocabulary) -> None:
        self.sequence = sequence
        self._decode = vocabulary.text
        self._stream = TextStream(vocabulary.text, sequence.params.stop, sequence.params.min_tokens)
        self._read = 0
        self._ended = False

    def read(self) -> Increment | None:
        """Return the new part of the choice; None if nothing is new."""
        # `ended` must be read before `count`, so that the last increment has all tokens
        sample, ended = self.sequence.sample, self.sequence.ended
        first, count = self._read, self.sequence.count
        if self._ended or (count == first and not ended):
            return None
        self._read, self._ended = count, ended
        ids = sample.output_ids[first:count]
        text = self._stream.feed(ids) + (self._stream.finish() if ended else "")
        reason = "abort" if sample.finish_reason == "aborted" else sample.finish_reason
        stop_word = self._stream.stop_word if ended else None
        return Increment(first, ids, text, reason if ended else None, stop_word)

    def count_until(self, word: str) -> int:
        """Return the number of read tokens up to the one that completes a word; without it, all of them."""
        ids = self.sequence.sample.output_ids[: self._read]
        return bisect.bisect_left(range(len(ids)), True, key=lambda count: word in self._decode(ids[:count]))


class Envelope:
    """Fields that every chunk of a response starts with.

    Args:
        prefix: of the response's id, "chatcmpl" or "cmpl".
        kind: value of `object`.
    """

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        capture = CURRENT.get()
        # a captured call is named by its call id, which its spans carry too
        name = capture.keys[0].call_id if capture and capture.keys else uuid.uuid4().hex
        self._id, self._kind, self._model, self._created = f"{prefix}-{name}", kind, model, int(time.time())

    def fields(self, suffix: str = "") -> JsonObject:
        """Return the fields, with `suffix` added to the value of `object`."""
        return {"id": self._id, "object": self._kind + suffix, "created": self._created, "model": self._model}


def resolve_adapter(engine: TransformersEngine, model: str | None) -> str | None:
    """Return the name of the adapter that a request asks for; None for the model without an adapter.

    Raises:
        RequestError: the model does not exist.
    """
    name = engine.model if model is None else model
    if name in engine.adapters:  # possibly under the name of the model itself
        return name
    if name == engine.model:
        return None
    raise UnknownModelError(name, *dict.fromkeys((engine.model, *engine.adapters)))


def params_per_choice(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Return the parameters of each choice.

    The choices of a seeded request get consecutive seeds, so that they differ and are reproducible.
    """
    return [params if params.seed is None else replace(params, seed=params.seed + i) for i in range(count)]


def usage(sequences: list[Sequence], prompts: list[list[int]]) -> dict[str, int]:
    """Return the numbers of prompt tokens (each prompt counted once) and sampled tokens."""
    prompt, sampled = sum(map(len, prompts)), sum(s.count for s in sequences)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def usage_field(request: SamplingBody, count: Callable[[], JsonObject]) -> JsonObject:
    """Return the field `usage` of a chunk with a choice, if its request asks for one.

    Args:
        count: returns the usage so far.
    """
    if not request.includes_usage:
        return {}
    return {"usage": count() if request.counts_each_chunk else None}


def finite(logprob: float) -> float:
    """Clip a log-probability to what JSON can express."""
    return max(logprob, MIN_LOGPROB)


async def sse(events: AsyncIterator[JsonObject]) -> AsyncIterator[bytes]:
    """Encode chunks as server-sent events.

    An error becomes an event too, because the status has been sent already.
    """
    try:
        async for event in events:
            yield sse_bytes(event)
    except RequestError as error:
        yield sse_bytes(
            {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.status}}
        )
    yield sse_bytes("[DONE]")
