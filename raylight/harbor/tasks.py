"""A folder of Harbor tasks as a dataset."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import get_args, overload

from raylight.errors import DatasetError, UnsupportedTaskError
from raylight.harbor.attempt import RunSteps
from raylight.harbor.task_folder import HarborTask, read_task
from raylight.types import JsonObject

TASK_KEY = "harbor_task"
"""Key of a row: the path of the task's folder."""
RUN_STEPS_KEY = "run_steps"
"""Key of a row: what a sandbox without images does with the RUN lines of a Dockerfile."""

logger = logging.getLogger(__name__)


class HarborTasks(Sequence[JsonObject]):
    """Tasks in Harbor's format, as rows for a `CommandAgent`: `fit(agent, HarborTasks("tasks/"))`.

    A row has the folder of its task, its name and its instruction as `prompt`. The folder must be at the same
    path on every machine with runners. All tasks are read at once, so that a damaged one is an error before
    anything starts.

    Args:
        folder: a task's folder, or a folder of such folders, at most three levels deep.
        include: pattern of the names that are taken, such as `"django*"`.
        exclude: patterns of the names that are left out.
        run_steps: what a sandbox without images, such as "bubblewrap", does with the RUN lines of a
            Dockerfile: "error", "skip" them because the machine has what they install, or "run" them in the
            sandbox.
        skip_unsupported: leave out tasks that need what raylight does not have, with a warning.

    Raises:
        DatasetError: no task is there, or one is damaged. UnsupportedTaskError: it needs what raylight
            does not have.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        include: str = "*",
        exclude: Sequence[str] = (),
        run_steps: RunSteps = "error",
        skip_unsupported: bool = False,
    ) -> None:
        if run_steps not in get_args(RunSteps):
            raise DatasetError(f"HarborTasks: run_steps is {run_steps!r:.80}; give error, skip or run")
        self._run_steps = run_steps
        self.folder = Path(folder).expanduser().resolve()
        if isinstance(exclude, str):
            raise DatasetError(f"HarborTasks: exclude is {exclude!r}; give a list of patterns")
        tasks = []
        for found in _task_folders(self.folder):
            try:
                task = read_task(found)
            except UnsupportedTaskError as error:
                if not skip_unsupported:
                    raise
                logger.warning("a task is left out: %s", error)
                continue
            if fnmatchcase(task.name, include) and not any(fnmatchcase(task.name, out) for out in exclude):
                tasks.append(task)
        if not tasks:
            raise DatasetError(
                f"{self.folder} has no task of Harbor's format whose name fits {include!r}; a task is a "
                "folder with task.toml, instruction.md and tests/test.sh"
            )
        self.tasks: list[HarborTask] = tasks

    def __len__(self) -> int:
        return len(self.tasks)

    @overload
    def __getitem__(self, index: int) -> JsonObject: ...
    @overload
    def __getitem__(self, index: slice) -> list[JsonObject]: ...
    def __getitem__(self, index: int | slice) -> JsonObject | list[JsonObject]:
        if isinstance(index, slice):
            return [self._row(task) for task in self.tasks[index]]
        return self._row(self.tasks[index])

    def _row(self, task: HarborTask) -> JsonObject:
        return {
            TASK_KEY: str(task.folder),
            "name": task.name,
            "prompt": task.instruction,
            RUN_STEPS_KEY: self._run_steps,
        }


def _task_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DatasetError(f"the folder of tasks {folder} is not there; correct the path")
    found = {
        path.parent for depth in ("", "*/", "*/*/", "*/*/*/") for path in folder.glob(f"{depth}task.toml")
    }
    return sorted(path for path in found if not any(parent in found for parent in path.parents))
