"""Adapters: from what was recorded to what an algorithm learns from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from raylight.types import Span

From = TypeVar("From", contravariant=True)
To = TypeVar("To", covariant=True)


class Adapter(ABC, Generic[From, To]):
    """Converts one kind of data into another. An adapter keeps no state between calls, and may be called like a function."""

    @abstractmethod
    def adapt(self, source: From, /) -> To:
        """Convert; the source is left as it is."""

    def __call__(self, source: From, /) -> To:
        return self.adapt(source)


class TraceAdapter(Adapter[Sequence[Span], To], Generic[To]):
    """Converts the spans of one attempt, as the store gives them. No spans are no calls: the result is empty."""
