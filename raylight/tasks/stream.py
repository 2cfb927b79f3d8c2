"""Task set that reads its tasks lazily, when a sampler draws them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator

from raylight.errors import DatasetError
from raylight.tasks.task_set import Draw, SetSampler, TaskSet
from raylight.types import JsonObject


class Stream(TaskSet):
    """A dataset that is read row by row, in its own order, and again from the start after its end.

    It is never in memory, and its length is not known, so that the algorithm needs `n_steps`. A resumed run
    reads the rows before its position again and drops them; so the source must give the same rows each time.

    Args:
        source: a dataset of Hugging Face or Ray, another iterable with a new iterator each time, or a
            function that returns an iterable.

    Raises:
        DatasetError: the source can be read only once, or not at all.
    """

    def __init__(self, source: Iterable[object] | Callable[[], Iterable[object]]) -> None:
        if isinstance(source, Iterator):
            raise DatasetError(
                f"the source of a Stream is a {type(source).__name__}, which can be read only once; give a "
                "function that returns it"
            )
        if not (callable(source) or isinstance(source, Iterable) or hasattr(source, "iter_rows")):
            raise DatasetError(
                f"the source of a Stream is a {type(source).__name__}; give an iterable, or a function that "
                "returns one"
            )
        self._source = source

    @property
    def size(self) -> None:
        return None

    def sampler(self, seed: int) -> StreamSampler:
        return StreamSampler(self._rows)

    def parts(self) -> list[tuple[str | None, object]]:
        raise DatasetError("a Stream has no end that is known; pass a list of tasks")

    def fingerprint(self) -> JsonObject:
        return {"stream": type(self._source).__name__}

    def _rows(self) -> Iterator[object]:
        if hasattr(self._source, "iter_rows"):  # a dataset of Ray
            return iter(self._source.iter_rows())
        return iter(self._source() if callable(self._source) else self._source)


logger = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 10.0
"""Longest wait for a read in progress when a sampler is closed, in seconds."""


class StreamSampler(SetSampler):
    """Reads forward; a number before its position is read from the start."""

    def __init__(self, rows: Callable[[], Iterator[object]]) -> None:
        self._rows = rows
        self._reading = threading.Lock()
        """Held while the iterator is used: a draw that was cancelled goes on in its thread."""
        self._begin()

    def _begin(self) -> None:
        self._iterator: Iterator[object] | None = None
        self._next = 0
        """Number of the next row."""

    def draw(self, number: int) -> Draw:
        """Return the row of a number.

        Raises:
            DatasetError: the stream is empty, or cannot be read.
        """
        with self._reading:
            if number < self._next:
                self._begin()
            row = self._read()
            while self._next <= number:
                row = self._read()
        return Draw(row)

    def close(self) -> None:
        """End the source's iterator, unless a read does not return in time.

        An iterator of Ray that is collected once its cluster has ended would start another one.
        """
        if not self._reading.acquire(timeout=CLOSE_TIMEOUT_S):
            return
        try:
            if (close := getattr(self._iterator, "close", None)) is not None:
                close()
        except Exception as error:  # whatever the source's own code raises; nothing more is read
            logger.warning("the stream's iterator raised at its end: %s: %s", type(error).__name__, error)
        finally:
            self._begin()
            self._reading.release()

    def _read(self) -> object:
        try:
            for _ in range(2):  # once more from the start
                if self._iterator is None:
                    self._iterator = self._rows()
                for row in self._iterator:
                    self._next += 1
                    return row
                self._iterator = None
        except Exception as error:  # whatever the source's own code raises
            raise DatasetError(f"the stream cannot be read: {type(error).__name__}: {error}") from error
        raise DatasetError("the stream is empty; pass one with at least one row")
