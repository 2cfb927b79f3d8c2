"""Task sets and their samplers, which draw one task for each group of rollouts.

Draws of a sampler are numbered from 0. Laws:
- A number is always drawn the same: again, and in a process that has continued from the sampler's state.
- Numbers may be drawn with gaps, and out of order.
- `state_dict` is plain JSON, and complete: with the same outcomes, the sampler of a resumed run draws what
  the sampler of an uninterrupted one does.
"""

from __future__ import annotations

import functools
import hashlib
import json
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raylight.types import JsonObject


@dataclass(frozen=True)
class Draw:
    """A drawn task."""

    task: Any
    source: str | None = None
    """Name of the source that it comes from; None if there is only one."""
    place: JsonObject = field(default_factory=dict)
    """Argument of `SetSampler.recall`, with which it is drawn again, as JSON."""


class SetSampler(ABC):
    """Draws tasks from a set."""

    learns: bool = False
    """True if outcomes change later draws."""

    @abstractmethod
    def draw(self, number: int) -> Draw:
        """Return the task of a number. It may block, if the set reads it from elsewhere."""

    def recall(self, number: int, place: JsonObject) -> None:
        """Note a draw, which an earlier process of the run may have made after its last training state."""
        return None

    def observe(self, number: int, reward: float | None) -> None:
        """Note the outcome of a draw, once.

        Args:
            reward: mean reward of the group's rollouts, without a penalty for length; None if none was
                scored, or the group was dropped.
        """
        return None

    def state_dict(self) -> JsonObject:
        """Return the state for `load_state_dict`, as plain JSON."""
        return {}

    def load_state_dict(self, state: JsonObject) -> None:
        return None

    def metrics(self) -> dict[str, float]:
        """Return the state as metrics of a step."""
        return {}

    def close(self) -> None:
        """End what it reads from. Nothing is drawn afterwards."""
        return None


class TaskSet(ABC):
    """Tasks, and the order in which a run draws them. `Trainer.fit` takes one as `train_dataset`."""

    @property
    @abstractmethod
    def size(self) -> int | None:
        """Number of tasks, of which a run takes `n_epochs` passes; None if it has no end."""

    @abstractmethod
    def sampler(self, seed: int) -> SetSampler:
        """Return a new sampler."""

    @abstractmethod
    def parts(self) -> list[tuple[str | None, object]]:
        """Return all tasks, each with its source.

        Raises:
            DatasetError: the set has no end.
        """

    @abstractmethod
    def fingerprint(self) -> JsonObject:
        """Return what identifies the set when a run resumes, as JSON."""


class ShuffledTasks(TaskSet):
    """A list of tasks; each pass over it has another order, which depends on the seed only."""

    def __init__(self, tasks: Sequence[object]) -> None:
        self.tasks = tasks

    @property
    def size(self) -> int:
        return len(self.tasks)

    def sampler(self, seed: int) -> TaskSampler:
        return TaskSampler(self.tasks, seed)

    def parts(self) -> list[tuple[str | None, object]]:
        return [(None, task) for task in self.tasks]

    def fingerprint(self) -> JsonObject:
        """Return the number of tasks and a digest of them; it is None unless they are plain JSON data."""
        try:
            text = json.dumps(self.tasks, sort_keys=True)
        except (TypeError, ValueError):
            return {"number": len(self.tasks), "digest": None}
        return {"number": len(self.tasks), "digest": hashlib.sha256(text.encode()).hexdigest()[:16]}


class TaskSampler(SetSampler):
    """Endless random order of tasks."""

    def __init__(self, tasks: Sequence[object], seed: int) -> None:
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


class NamedSamplers(SetSampler):
    """Base of a sampler that draws from several named ones."""

    def __init__(self, samplers: Mapping[str, SetSampler]) -> None:
        self._samplers = dict(samplers)

    def close(self) -> None:
        for sampler in self._samplers.values():
            sampler.close()

    def state_dict(self) -> JsonObject:
        return {name: sampler.state_dict() for name, sampler in self._samplers.items()}

    def load_state_dict(self, state: JsonObject) -> None:
        for name, sampler in self._samplers.items():
            sampler.load_state_dict(state.get(name, {}))

    def metrics(self) -> dict[str, float]:
        return {
            f"{name}/{metric}": value
            for name, sampler in self._samplers.items()
            for metric, value in sampler.metrics().items()
        }


def named_parts(sets: Mapping[str, TaskSet]) -> list[tuple[str | None, object]]:
    """Return all tasks of named sets, each with its source."""
    return [(join_names(name, inner), task) for name, one in sets.items() for inner, task in one.parts()]


def join_names(name: str, inner: str | None) -> str:
    return name if inner is None else f"{name}/{inner}"
