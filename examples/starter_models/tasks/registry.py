"""Registry of the task families, and demonstrations by the name of a task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from examples.starter_models.tasks.arithmetic import add, calculator
from examples.starter_models.tasks.grid_worlds import gymnasium
from examples.starter_models.tasks.guessing import textarena
from examples.starter_models.tasks.puzzles import reasoning_gym
from examples.starter_models.tasks.repairs import harness
from raylight.components import build_component, import_dotted_name
from raylight.errors import ConfigError, DatasetError


@dataclass(frozen=True)
class TaskFamily:
    """A family of tasks.

    Attributes:
        demonstrate: function that yields demonstrations, as `Demonstration.parse` takes them. Of the first
            ones, up to 128 measure the accuracy and are not trained on. Its parameters are options, and
            `seed` if it has one.
        size: size of the model.
        steps: training steps at most, not counting the careless teacher's.
        accuracy: accuracy that is aimed at.
        argument: option that follows the colon of a task's name; none for a family without.
    """

    demonstrate: Callable[..., Iterable[Any]]
    size: str = "small"
    steps: int = 1000
    accuracy: float = 0.5
    argument: str = ""


FAMILIES = {
    "add": TaskFamily(add),
    "calculator": TaskFamily(calculator),
    "reasoning_gym": TaskFamily(reasoning_gym, argument="name"),
    "gymnasium": TaskFamily(gymnasium, accuracy=0.3, argument="id"),
    "textarena": TaskFamily(textarena, argument="id"),
    "harness": TaskFamily(harness, argument="format"),
}
"""Task families by name."""
FORMS = {name: f"{name}:{f.argument.upper()}" if f.argument else name for name, f in FAMILIES.items()}
"""Names of the tasks of each family, as users write them."""
KNOWN = f"the tasks are {', '.join(FORMS.values())} and package.module:function"
"""List of all tasks, for messages."""


def find_family(task: Any, options: Mapping[str, Any]) -> tuple[TaskFamily, dict[str, Any]]:
    """Return the family of a task, and all options of its function.

    Args:
        task: name of a family, `FAMILY:ARGUMENT`, the dotted name of a function, `package.module:function`,
            or the function.
        options: options of the function.

    Raises:
        ConfigError: there is no such family or function, or the argument is missing.
    """
    if not isinstance(task, str):
        return TaskFamily(task), dict(options)
    name, colon, argument = task.partition(":")
    if name not in FAMILIES:
        if not colon:
            raise ConfigError(f"there is no task {task!r}; {KNOWN}")
        return TaskFamily(import_dotted_name(task, "task")), dict(options)
    family = FAMILIES[name]
    if bool(argument) != bool(family.argument):
        raise ConfigError(f"task {task!r}: write {FORMS[name]!r}")
    return family, {**options, **({family.argument: argument} if argument else {})}


def demonstrations(family: TaskFamily, options: Mapping[str, Any], seed: int, task: str) -> Iterator[Any]:
    """Return the demonstrations of a family.

    Args:
        task: name of the task, for error messages.

    Raises:
        ConfigError: the options do not fit the function.
        DatasetError: the function does not return demonstrations.
    """
    found = build_component({"type": family.demonstrate, **options}, object, f"task {task}", seed=seed)
    if isinstance(found, str | bytes) or not hasattr(found, "__iter__"):
        raise DatasetError(f"task {task} returned {found!r:.80}; the function has to yield demonstrations")
    return iter(found)
