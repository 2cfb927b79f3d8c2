"""Tasks with their resources in memory, for trying an agent."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from raylight.agent.resources import NamedResources


class DevTaskLoader(list[Any]):
    """Tasks for `Trainer.dev` or `fit`, with resources for the agent; a name of agent-lightning.

    The Trainer's own `initial_resources` go first.

    Args:
        tasks: at least one.
        resources: resources by name.

    Raises:
        ValueError: there is no task.
    """

    def __init__(self, tasks: Iterable[Any], resources: NamedResources) -> None:
        super().__init__(tasks)
        if not self:
            raise ValueError("tasks is empty; give DevTaskLoader at least one task")
        self.resources = dict(resources)
