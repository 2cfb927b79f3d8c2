"""Order in which training steps consume the tasks."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any


class TaskSampler(Iterator[list[Any]]):
    """Endless iterator of task batches.

    Each pass over the tasks has another random order. A batch may span two passes.

    Args:
        size: tasks per batch.
        seed: the order depends on the seed and the number of consumed tasks only.
    """

    def __init__(self, tasks: list[Any], size: int, seed: int) -> None:
        self._tasks, self._size, self._seed = tasks, size, seed
        self.seek(0)

    def seek(self, consumed: int) -> None:
        """Continue after the first `consumed` tasks."""
        self._shuffle = random.Random(self._seed).shuffle
        self._waiting: list[Any] = []
        self.consumed = consumed
        """Number of tasks returned so far."""
        for _ in range(consumed // len(self._tasks) + 1):
            self._waiting = self._shuffled_pass()
        del self._waiting[: consumed % len(self._tasks)]

    def __next__(self) -> list[Any]:
        while len(self._waiting) < self._size:
            self._waiting += self._shuffled_pass()
        batch, self._waiting = self._waiting[: self._size], self._waiting[self._size :]
        self.consumed += len(batch)
        return batch

    def _shuffled_pass(self) -> list[Any]:
        tasks = list(self._tasks)
        self._shuffle(tasks)
        return tasks
