"""The choices of one request while they are sampled."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from raylight.engines.transformers.sequence import Sequence


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
