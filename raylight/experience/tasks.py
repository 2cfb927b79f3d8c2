"""The training tasks in the order in which steps take them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


class Batches(Iterator[list[Any]]):
    """Batches of tasks without end; each pass over the tasks is shuffled anew, and a batch may span two passes.

    Args:
        size: tasks of a batch.
    """

    def __init__(self, tasks: list[Any], size: int, seed: int) -> None:
        self._tasks, self._size, self._seed = tasks, size, seed
        self.go_to(0)

    def go_to(self, taken: int) -> None:
        """Continue after the first `taken` tasks."""
        self._shuffle = random.Random(self._seed).shuffle
        self._waiting: list[Any] = []
        self.taken = taken
        """Tasks that were taken so far."""
        for _ in range(taken // len(self._tasks) + 1):
            self._waiting = self._one_pass()
        del self._waiting[: taken % len(self._tasks)]

    def __next__(self) -> list[Any]:
        while len(self._waiting) < self._size:
            self._waiting += self._one_pass()
        batch, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
        self.taken += len(batch)
        return batch

    def _one_pass(self) -> list[Any]:
        tasks = list(self._tasks)
        self._shuffle(tasks)
        return tasks
