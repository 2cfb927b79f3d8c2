"""Datasets of users as sets of tasks: sequences, iterables, datasets of Hugging Face and Ray."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable
from typing import Any

from raylight.agent.resources import NamedResources
from raylight.errors import DatasetError
from raylight.tasks.stream import Stream
from raylight.tasks.task_set import ShuffledTasks, TaskSet

MAX_ROWS = 10_000_000
"""Maximum number of tasks of a dataset. The driver holds all of them."""


def as_task_set(dataset: Any, name: str) -> TaskSet:
    """Return a dataset as a set of tasks: a TaskSet as it is, one of Hugging Face that is streamed as a
    `Stream`, and any other as a list.

    Raises:
        DatasetError: it cannot be read, is empty, or has more than `MAX_ROWS` tasks.
    """
    if isinstance(dataset, TaskSet):
        return dataset
    if is_instance_of(dataset, "datasets", "IterableDataset"):
        return Stream(dataset)
    rows = as_dataset(dataset, name)
    try:
        tasks = list(rows) if isinstance(rows, Iterable) else [rows[i] for i in range(len(rows))]
    except Exception as error:  # whatever the dataset's own code raises
        raise DatasetError(f"{name} cannot be read: {type(error).__name__}: {error}") from error
    return ShuffledTasks(tasks)


def as_dataset(dataset: Any, name: str) -> Any:
    """Return a dataset after checking that it has tasks; an iterator and a dataset of Ray become a list.

    Raises:
        DatasetError: the dataset cannot be iterated, is empty, or has more than `MAX_ROWS` tasks.
    """
    if dataset is None:
        return None
    # a torch Dataset need not be iterable
    sized = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
    if is_instance_of(dataset, "ray.data", "Dataset"):
        dataset = _ray_rows(dataset)
    elif isinstance(dataset, str | bytes | dict) or not (sized or isinstance(dataset, Iterable)):
        raise DatasetError(
            f"{name} is a {type(dataset).__name__}; pass a list (or another sequence) of tasks"
        )
    try:
        dataset = dataset if sized else list(itertools.islice(dataset, MAX_ROWS + 1))  # it may have no end
        n_rows = len(dataset)
    except Exception as error:  # whatever the dataset's own code raises
        raise DatasetError(f"{name} cannot be read: {type(error).__name__}: {error}") from error
    if n_rows == 0:
        raise DatasetError(f"{name} is empty; pass at least one task")
    if n_rows > MAX_ROWS:
        raise DatasetError(
            f"{name} has more than {MAX_ROWS:,} tasks, which are held in memory; pass a part of it, or an "
            "rl.tasks.Stream"
        )
    return dataset


def _ray_rows(dataset: Any) -> Iterable[object]:
    """Yield the rows of a dataset of Ray in the order of its blocks, the same in every run."""
    context = dataset.context.execution_options
    kept, context.preserve_order = context.preserve_order, True
    try:
        yield from dataset.iter_rows()
    finally:
        context.preserve_order = kept


def is_instance_of(value: object, module: str, name: str) -> bool:
    """Return True for an instance of a class of a module, without importing it."""
    cls = getattr(sys.modules.get(module), name, None)
    return cls is not None and isinstance(value, cls)


class DevTaskLoader(list[object]):
    """Tasks for `Trainer.dev` or `fit`, with resources for the agent; a name of agent-lightning.

    The Trainer's own `initial_resources` go first.

    Args:
        tasks: at least one.
        resources: resources by name.

    Raises:
        ValueError: the dataset has no task.
    """

    def __init__(self, tasks: Iterable[object], resources: NamedResources) -> None:
        super().__init__(tasks)
        if not self:
            raise ValueError("tasks is empty; give DevTaskLoader at least one task")
        self.resources = dict(resources)
