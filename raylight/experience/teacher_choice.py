"""Choice of a row's teacher, of several, by its task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from raylight.errors import ConfigError
from raylight.types import FinishedRollout, Trajectory

TeacherChoice: TypeAlias = str | Callable[[Any], str]
"""Key of a task, or a function of it, that gives the name of the task's teacher."""


def choose_teachers(
    rows: Sequence[Trajectory],
    finished: Sequence[FinishedRollout],
    names: Sequence[str],
    choice: TeacherChoice,
) -> list[int]:
    """Return the number of each row's teacher among the names.

    Args:
        finished: the rollouts of the rows.

    Raises:
        ConfigError: a task has no such key, the function fails, or there is no teacher of the name.
    """
    tasks = {item.rollout.rollout_id: item.rollout.input for item in finished}
    known = {
        rollout_id: _choose(tasks[rollout_id], names, choice, rollout_id)
        for rollout_id in dict.fromkeys(row.rollout_id for row in rows)
    }
    return [known[row.rollout_id] for row in rows]


def _choose(task: Any, names: Sequence[str], choice: TeacherChoice, rollout_id: str) -> int:
    if callable(choice):
        try:
            name = choice(task)
        except Exception as error:  # the user's code
            raise ConfigError(
                f"teacher_of raised {type(error).__name__} for rollout {rollout_id}: {error}"
            ) from error
    elif isinstance(task, Mapping) and choice in task:
        name = task[choice]
    else:
        raise ConfigError(
            f"the task of rollout {rollout_id} has no key {choice!r}, by which teacher_of chooses its "
            "teacher; add it to the tasks, or give a function of the task"
        )
    if name not in names:
        raise ConfigError(
            f"teacher_of gives the teacher {name!r:.80} for rollout {rollout_id}, and there are: "
            f"{', '.join(names)}; add it to teachers, or change the task"
        )
    return names.index(name)
