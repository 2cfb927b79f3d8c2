"""The state of one choice while it is sampled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from raylight.engines.capture_context import Sample
from raylight.engines.transformers.adapters import LoadedAdapter
from raylight.engines.transformers.sampling import SamplingParams
from raylight.engines.transformers.text import TextStream
from raylight.images.image import Image
from raylight.types import IntArray, RouteArray, TokenSets
from raylight.types.images import compared_ids


@dataclass(eq=False)
class Sequence:
    """One choice of a request while it is sampled.

    The engine's thread writes; the event loop reads and cancels.
    """

    sample: Sample
    params: SamplingParams
    loop: asyncio.AbstractEventLoop
    progressed: asyncio.Event
    """Set in `loop` when the sequence ends and, if it streams, after each token."""
    streams: bool = False
    adapter_name: str | None = None
    """Name of the requested adapter; None for the model itself."""
    adapter: LoadedAdapter | None = None
    """Version of the adapter that the sequence started with."""
    generator: torch.Generator | None = None
    grammar_matcher: Any = None
    """State of the response within the grammar of `params`."""
    stop_words: TextStream | None = None
    """Detects the stop words of `params`."""
    images: tuple[Image, ...] = ()
    """Files of the images of the prompt."""
    position_delta: int = 0
    """Difference between the rotary position of a token after the images and its index."""
    routed: int = 0
    """Number of its tokens whose routes are recorded."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Per token, the most probable tokens and their log-probabilities, if requested."""
    ended: bool = False
    error: Exception | None = None
    cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def length(self) -> int:
        """Number of tokens, prompt and response."""
        return len(self.sample.prompt_ids) + len(self.sample.output_ids)

    @property
    def ids(self) -> IntArray:
        """Token ids of prompt and response, shape (tokens,)."""
        return self.sample.token_ids

    @property
    def compared_ids(self) -> IntArray:
        """Token ids, different where images differ, shape (tokens,)."""
        return compared_ids(self.ids, self.sample.images)

    @property
    def count(self) -> int:
        """Number of sampled tokens that have their log-probability and version."""
        return len(self.sample.weight_versions)

    def append(
        self,
        token: int,
        logprob: float,
        version: int,
        allowed: tuple[int, float] | None = None,
        candidates: TokenSets | None = None,
    ) -> None:
        """Add a sampled token, unless the sequence is cancelled.

        The version is added last, because `count` relies on it.

        Args:
            allowed: number of tokens that could have been sampled, and the token's log-probability under the
                policy alone; None if the request has no constraint.
            candidates: tokens that could have been sampled; None if they are not kept.
        """
        with self._lock:
            if not self.cancelled:
                self.sample.output_ids.append(token)
                self.sample.logprobs.append(logprob)
                if allowed is not None:
                    self.sample.allowed.append(allowed[0])
                    self.sample.policy_logprobs.append(allowed[1])
                if candidates is not None:
                    self.sample.candidates.append(candidates)
                self.sample.weight_versions.append(version)

    def record_routes(self, parts: list[RouteArray], start: int) -> None:
        """Add routes, parts of shape (tokens, layers, experts of a token), of the tokens from `start` on.
        Recorded ones, which were computed before, are skipped."""
        for part in parts:
            known = self.routed - start
            assert known >= 0, "tokens are computed in their order"
            if known < len(part):
                self.sample.routes.append(part[known:])
                self.routed += len(part) - known
            start += len(part)

    def cancel(self) -> None:
        """Stop sampling.

        On return the sample is consistent and final. No effect on a sequence that has ended.
        """
        with self._lock:
            self.cancelled = True


def notify(sequences: Iterable[Sequence]) -> None:
    """Set the sequences' `progressed` events from the engine's thread, waking each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for sequence in sequences:
        by_loop.setdefault(sequence.loop, []).append(sequence.progressed)
    for loop, events in by_loop.items():
        if not loop.is_closed():  # a closed loop has no waiters
            loop.call_soon_threadsafe(_set_all, events)


def _set_all(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()


class Choices:
    """The sequences of one request. Leaving the `with` block cancels those that still run.

    Args:
        progressed: event that is set when a sequence has new tokens or has ended.
        release: called once, on close.
    """

    def __init__(
        self, sequences: list[Sequence], progressed: asyncio.Event, release: Callable[[], None]
    ) -> None:
        self.sequences = sequences
        self._progressed = progressed
        self._release = release
        self._closed = False

    def __enter__(self) -> Choices:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def progress(self) -> AsyncIterator[None]:
        """Yield after each progress; the last time when all sequences have ended.

        Raises:
            Exception: the error that ended one of the sequences.
        """
        while True:
            self._progressed.clear()  # before reading the sequences, so that no progress is missed
            error = next((s.error for s in self.sequences if s.error), None)
            if error is not None:
                raise error
            done = all(s.ended for s in self.sequences)
            yield
            if done:
                return
            await self._progressed.wait()

    async def end(self) -> list[Sequence]:
        """Wait until all sequences have ended, and return them."""
        async for _ in self.progress():
            pass
        return self.sequences

    def close(self) -> None:
        """Cancel the sequences that still run."""
        if not self._closed:
            self._closed = True
            for sequence in self.sequences:
                sequence.cancel()
            self._release()
