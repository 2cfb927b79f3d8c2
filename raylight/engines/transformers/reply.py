"""What the answers of all routes that sample have in common."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any, Protocol

from raylight.engines.capture_context import CURRENT
from raylight.engines.transformers.choices import Choices
from raylight.engines.transformers.params import SamplingParams
from raylight.engines.transformers.sequence import Sequence
from raylight.engines.transformers.text import TextStream
from raylight.engines.transformers.vocabulary import Vocabulary
from raylight.http.errors import RequestError
from raylight.http.sse import sse_bytes

LEAST = -9999.0
"""Stands for minus infinity, which JSON has not."""


class Reply(Protocol):
    """An answer whose choices are being sampled."""

    choices: Choices
    streams: bool

    async def whole(self) -> dict[str, Any]:
        """The answer, once it is complete."""
        ...

    def events(self) -> AsyncIterator[dict[str, Any]]:
        """The answer in chunks."""
        ...


@dataclass(frozen=True)
class Grown:
    """What a choice has more than before.

    Attributes:
        first: number of its first new token.
        text: what is certain of the new text.
        reason: why it ended, as it goes over the wire; None if it has not.
        stop_word: the stop word that ended it.
    """

    first: int
    ids: list[int]
    text: str
    reason: str | None
    stop_word: str | None

    @property
    def end(self) -> dict[str, str | None]:
        """As vLLM tells it too."""
        return {"finish_reason": self.reason, "stop_reason": self.stop_word}


class Reader:
    """Reads one choice as it grows."""

    def __init__(self, sequence: Sequence, vocabulary: Vocabulary) -> None:
        self.sequence = sequence
        self._stream = TextStream(vocabulary.text, sequence.params.stop, sequence.params.min_tokens)
        self._seen = 0
        self._ended = False

    def read(self) -> Grown | None:
        """What is new; None if nothing is."""
        sample, ended = (
            self.sequence.sample,
            self.sequence.ended,
        )  # first whether it ended, then how far it came
        first, count = self._seen, self.sequence.count
        if self._ended or (count == first and not ended):
            return None
        self._seen, self._ended = count, ended
        ids = sample.output_ids[first:count]
        text = self._stream.feed(ids) + (self._stream.finish() if ended else "")
        reason = "abort" if sample.finish_reason == "aborted" else sample.finish_reason
        return Grown(first, ids, text, reason if ended else None, self._stream.stop_word if ended else None)


class Head:
    """What every part of an answer begins with."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        exchange = CURRENT.get()
        name = (
            exchange.keys[0].call_id if exchange and exchange.keys else uuid.uuid4().hex
        )  # its spans name it
        self._id, self._kind, self._model, self._created = f"{prefix}-{name}", kind, model, int(time.time())

    def part(self, suffix: str = "") -> dict[str, Any]:
        return {"id": self._id, "object": self._kind + suffix, "created": self._created, "model": self._model}


def adapter_of(engine: Any, model: str | None) -> str | None:
    """The adapter that a request's model is; None for the model itself.

    Raises:
        RequestError: there is no such model.
    """
    if model is None or model == engine.model:
        return None
    if model in engine.adapters:
        return model
    served = ", ".join(repr(name) for name in [engine.model, *engine.adapters])
    raise RequestError(
        f"the model {model!r} does not exist; this endpoint serves {served}", 404, "not_found_error"
    )


def numbered(params: SamplingParams, count: int) -> list[SamplingParams]:
    """Several choices of one seeded request differ, and are reproducible all the same."""
    return [params if params.seed is None else replace(params, seed=params.seed + i) for i in range(count)]


def usage(sequences: list[Sequence], prompts: list[list[int]]) -> dict[str, int]:
    """How many tokens were read (each prompt once) and sampled."""
    read, sampled = sum(map(len, prompts)), sum(s.count for s in sequences)
    return {"prompt_tokens": read, "completion_tokens": sampled, "total_tokens": read + sampled}


def finite(logprob: float) -> float:
    return max(logprob, LEAST)


async def sse(events: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Chunks as server-sent events. What fails after the first one is told in an event, for the status is sent already."""
    try:
        async for event in events:
            yield sse_bytes(event)
    except RequestError as error:
        yield sse_bytes(
            {"error": {"message": str(error), "type": error.kind, "param": None, "code": error.status}}
        )
    yield sse_bytes("[DONE]")
