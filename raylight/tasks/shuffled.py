"""A list of tasks in random order."""

from __future__ import annotations

import functools
import hashlib
import json
import random
from collections.abc import Sequence
from typing import Any

from raylight.tasks.task_set import Draw, SetSampler, TaskSet


class ShuffledTasks(TaskSet):
    """A list of tasks; each pass over it has another order, which depends on the seed only."""

    def __init__(self, tasks: Sequence[Any]) -> None:
        self.tasks = tasks

    @property
    def size(self) -> int:
        return len(self.tasks)

    def sampler(self, seed: int) -> TaskSampler:
        return TaskSampler(self.tasks, seed)

    def parts(self) -> list[tuple[str | None, Any]]:
        return [(None, task) for task in self.tasks]

    def fingerprint(self) -> dict[str, Any]:
        """Return the number of tasks and a digest of them; it is None unless they are plain JSON data."""
        try:
            text = json.dumps(self.tasks, sort_keys=True)
        except (TypeError, ValueError):
            return {"number": len(self.tasks), "digest": None}
        return {"number": len(self.tasks), "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}


class TaskSampler(SetSampler):
    """Endless random order of tasks."""

    def __init__(self, tasks: Sequence[Any], seed: int) -> None:
        self._tasks, self._seed = tasks, seed
        self._order = functools.lru_cache(maxsize=16)(self._shuffled)

    def draw(self, number: int) -> Draw:
        passes, position = divmod(number, len(self._tasks))
        return Draw(self._tasks[self._order(passes)[position]])

    def _shuffled(self, number: int) -> list[int]:
        """Return the indices of the tasks in the order of a pass."""
        return shuffled_indices(len(self._tasks), f"{self._seed}-{number}")


def shuffled_indices(n: int, seed: str) -> list[int]:
    """Return the numbers below `n` in random order."""
    order = list(range(n))
    random.Random(seed).shuffle(order)
    return order
