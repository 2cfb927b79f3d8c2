"""The choices of one request while they are sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from raylight.engines.transformers.sequence import Sequence


class Choices:
    """The sequences of one request, which end together: leaving the block cancels those that still run.

    Args:
        news: set when one of them has something new.
        release: called once, at the end.
    """

    def __init__(self, sequences: list[Sequence], news: asyncio.Event, release: Callable[[], None]) -> None:
        self.sequences = sequences
        self._news = news
        self._release = release
        self._closed = False

    def __enter__(self) -> Choices:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def progress(self) -> AsyncIterator[None]:
        """One item whenever there is something new, the last one when all have ended.

        Raises:
            Exception: whatever ended one of the sequences.
        """
        while True:
            self._news.clear()  # first, so that nothing new is missed
            error = next((s.error for s in self.sequences if s.error), None)
            if error is not None:
                raise error
            done = all(s.ended for s in self.sequences)
            yield
            if done:
                return
            await self._news.wait()

    async def end(self) -> list[Sequence]:
        """The sequences, once all have ended."""
        async for _ in self.progress():
            pass
        return self.sequences

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            for sequence in self.sequences:
                sequence.cancel()
            self._release()
