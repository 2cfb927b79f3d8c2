"""Base classes of adapters, which convert recorded spans to an algorithm's training data."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

from raylight.types import Span

Source = TypeVar("Source", contravariant=True)
Result = TypeVar("Result", covariant=True)


class Adapter(ABC, Generic[Source, Result]):
    """Stateless converter from one kind of data to another, which can be called like a function."""

    @abstractmethod
    def adapt(self, source: Source, /) -> Result:
        """Convert `source`, without changing it."""

    def __call__(self, source: Source, /) -> Result:
        return self.adapt(source)


class TraceAdapter(Adapter[Sequence[Span], Result], Generic[Result]):
    """Converter of the spans of one attempt, as the store returns them. Without spans the result is empty."""
