"""Curriculum by difficulty: tasks in pools, which the outcomes of their groups move."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Literal, get_args

from raylight._utils.bounds import MAX_FACTOR, is_number
from raylight.errors import ConfigError, DatasetError
from raylight.tasks.datasets import as_task_set
from raylight.tasks.task_set import Draw, SetSampler, ShuffledTasks, TaskSet, shuffled_indices
from raylight.types import JsonObject

Pool = Literal["untested", "learnable", "unsolved", "solved"]
POOLS: tuple[Pool, ...] = get_args(Pool)
DEFAULT_WEIGHTS: dict[Pool, float] = {"untested": 1.0, "learnable": 1.0, "unsolved": 0.2, "solved": 0.1}


class Curriculum(TaskSet):
    """Draws tasks by how well they were solved last.

    A task is untested at first. The mean reward of its group moves it: to solved from `solved` on, to
    unsolved up to `unsolved`, else to learnable. A draw chooses a pool that has tasks, by weight, and takes
    the task that has been in it, or was drawn from it, longest ago. So solved and unsolved tasks are tested
    again now and then.

    Args:
        tasks: a list of tasks.
        weights: weights of pools, over the defaults: 1 for untested and learnable, 0.2 for unsolved, 0.1 for
            solved. A pool with 0 is drawn from only if all others are empty.
        solved: smallest mean reward of a solved task.
        unsolved: largest mean reward of an unsolved one.

    Raises:
        ConfigError: a pool is unknown, a weight is negative or not a number, or the bounds overlap.
        DatasetError: the tasks are not a list, or empty.
    """

    def __init__(
        self,
        tasks: object,
        *,
        weights: Mapping[str, float] | None = None,
        solved: float = 0.9,
        unsolved: float = 0.1,
    ) -> None:
        found = as_task_set(tasks, "the tasks of a Curriculum")
        if not isinstance(found, ShuffledTasks):
            raise DatasetError(
                f"a Curriculum tests its tasks again, and a {type(found).__name__} has no list of them; give "
                "a list"
            )
        given = dict(weights or {})
        if unknown := [name for name in given if name not in POOLS]:
            raise ConfigError(f"a Curriculum has no pools {', '.join(unknown)}; it has {', '.join(POOLS)}")
        self.weights: dict[Pool, float] = {pool: given.get(pool, DEFAULT_WEIGHTS[pool]) for pool in POOLS}
        are_weights = all(is_number(weight, 0, MAX_FACTOR) for weight in self.weights.values())
        if not are_weights or not any(self.weights.values()):
            raise ConfigError(
                f"the weights of a Curriculum are {self.weights}; they must be numbers, at least 0, and not "
                "all 0"
            )
        are_bounds = all(is_number(bound, -MAX_FACTOR, MAX_FACTOR) for bound in (unsolved, solved))
        if not are_bounds or not unsolved < solved:
            raise ConfigError(f"unsolved={unsolved!r:.80} must be a number less than solved={solved!r:.80}")
        self._tasks, self._solved, self._unsolved = found, solved, unsolved

    @property
    def size(self) -> int:
        return self._tasks.size

    def sampler(self, seed: int) -> CurriculumSampler:
        return CurriculumSampler(self._tasks.tasks, seed, self.weights, self._solved, self._unsolved)

    def parts(self) -> list[tuple[str | None, object]]:
        return self._tasks.parts()

    def fingerprint(self) -> JsonObject:
        bounds = {"solved": self._solved, "unsolved": self._unsolved}
        return {"curriculum": self._tasks.fingerprint(), "weights": self.weights, **bounds}


class CurriculumSampler(SetSampler):
    """State machine of a curriculum."""

    learns = True

    def __init__(
        self, tasks: Any, seed: int, weights: Mapping[Pool, float], solved: float, unsolved: float
    ) -> None:
        self._tasks, self._seed, self._weights = tasks, seed, weights
        self._solved, self._unsolved = solved, unsolved
        # a dict is a queue without duplicates, from which any entry is removed at once
        self._pools: dict[Pool, dict[int, None]] = {pool: {} for pool in POOLS}
        self._pools["untested"] = dict.fromkeys(shuffled_indices(len(tasks), f"{seed}-0"))
        self._open: dict[int, int] = {}
        """Task of each draw without an outcome."""

    def pool_of(self, task: int) -> Pool:
        return next(pool for pool in POOLS if task in self._pools[pool])

    def draw(self, number: int) -> Draw:
        if number not in self._open:
            self._take(number, next(iter(self._pools[self._choose(number)])))
        index = self._open[number]
        return Draw(self._tasks[index], None, {"task": index})

    def recall(self, number: int, place: JsonObject) -> None:
        if self._open.get(number) != place["task"]:
            self._take(number, int(place["task"]))

    def observe(self, number: int, reward: float | None) -> None:
        index = self._open.pop(number, None)
        if index is None or reward is None:
            return
        pool: Pool = "learnable"
        if reward >= self._solved:
            pool = "solved"
        elif reward <= self._unsolved:
            pool = "unsolved"
        if (old := self.pool_of(index)) != pool:
            del self._pools[old][index]
            self._pools[pool][index] = None

    def state_dict(self) -> JsonObject:
        return {
            "pools": {pool: list(tasks) for pool, tasks in self._pools.items()},
            "open": sorted(self._open.items()),
        }

    def load_state_dict(self, state: JsonObject) -> None:
        if not state:
            return
        self._pools = {pool: dict.fromkeys(state["pools"][pool]) for pool in POOLS}
        self._open = {int(number): int(index) for number, index in state["open"]}

    def metrics(self) -> dict[str, float]:
        return {pool: float(len(tasks)) for pool, tasks in self._pools.items()}

    def _choose(self, number: int) -> Pool:
        """Return the pool of a draw: one that has tasks, by weight."""
        filled = [pool for pool in POOLS if self._pools[pool]]
        weights = [self._weights[pool] for pool in filled]
        draw = random.Random(f"{self._seed}-draw-{number}")
        return draw.choices(filled, weights if any(weights) else None)[0]

    def _take(self, number: int, index: int) -> None:
        """Note a draw, and move its task to the end of its pool."""
        self._open[number] = index
        tasks = self._pools[self.pool_of(index)]
        del tasks[index]
        tasks[index] = None
