"""Order in which the groups of rollouts consume the tasks."""

from __future__ import annotations

import functools
import random
from typing import Any


class TaskSampler:
    """Endless random order of the tasks: one task for each numbered group of rollouts.

    Each pass over the tasks has another order, which depends on the seed only.
    """

    def __init__(self, tasks: list[Any], seed: int) -> None:
        self._tasks, self._seed = tasks, seed
        self._order = functools.lru_cache(maxsize=16)(self._shuffled)

    def task(self, group: int) -> Any:
        """Return the task of a group."""
        number, position = divmod(group, len(self._tasks))
        return self._tasks[self._order(number)[position]]

    def _shuffled(self, number: int) -> list[int]:
        """Return the indices of the tasks in the order of a pass."""
        order = list(range(len(self._tasks)))
        random.Random(f"{self._seed}-{number}").shuffle(order)
        return order
