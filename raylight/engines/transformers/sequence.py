"""A choice on its way through the engine."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from raylight.engines.capture_context import Sample
from raylight.engines.transformers.adapters import LoadedAdapter
from raylight.engines.transformers.params import SamplingParams
from raylight.engines.transformers.text import TextStream


@dataclass(eq=False)
class Sequence:
    """A choice on its way through the engine. The engine's thread writes; the event loop reads, and cancels."""

    sample: Sample
    params: SamplingParams
    loop: asyncio.AbstractEventLoop
    news: asyncio.Event
    """Set in the loop when the sequence ends and, if it streams, after each token."""
    streams: bool = False
    model: str | None = None
    """The adapter that was asked for; None for the model itself."""
    adapter: LoadedAdapter | None = None
    """The version of it that the sequence began with."""
    generator: torch.Generator | None = None
    matcher: Any = None
    """Follows the grammar of `params`."""
    stops: TextStream | None = None
    """Looks for the stop words of `params`."""
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    """Per token the likeliest ones and their log-probabilities, if asked for."""
    ended: bool = False
    error: Exception | None = None
    cancelled: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def length(self) -> int:
        return len(self.sample.prompt_ids) + len(self.sample.output_ids)

    @property
    def ids(self) -> list[int]:
        return self.sample.prompt_ids + self.sample.output_ids

    @property
    def count(self) -> int:
        """Tokens that are complete with log-probability and version."""
        return len(self.sample.weight_versions)

    def append(self, token: int, logprob: float, version: int) -> None:
        """Add a sampled token; its version last, because `count` goes by it. A cancelled sequence grows no more."""
        with self._lock:
            if not self.cancelled:
                self.sample.output_ids.append(token)
                self.sample.logprobs.append(logprob)
                self.sample.weight_versions.append(version)

    def cancel(self) -> None:
        """Sample no more; afterwards the sample is whole and stays as it is. Without effect on a sequence that has ended."""
        with self._lock:
            self.cancelled = True


def wake(sequences: Iterable[Sequence]) -> None:
    """Tell those who wait for the sequences, from the engine's thread, waking each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for sequence in sequences:
        by_loop.setdefault(sequence.loop, []).append(sequence.news)
    for loop, events in by_loop.items():
        if not loop.is_closed():  # else nobody waits any more
            loop.call_soon_threadsafe(_set, events)


def _set(events: list[asyncio.Event]) -> None:
    for event in events:
        event.set()
