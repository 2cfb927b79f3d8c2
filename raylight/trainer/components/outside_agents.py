"""The agents outside a run, in place of its runners."""

from __future__ import annotations

import contextlib
from collections.abc import Coroutine
from typing import Any

from raylight.config import SessionConfig
from raylight.runner.scaling import Resizable


class OutsideAgents:
    """Agents that open sessions at the served model. The run starts none of them."""

    is_started = False

    def __init__(self, config: SessionConfig) -> None:
        self._config = config

    @property
    def resizable(self) -> dict[str, Resizable]:
        """Nothing: `raylight scale` does not start agents."""
        return {}

    def open(self, stack: contextlib.AsyncExitStack) -> None:
        """Do nothing: the agents do not end with the run."""

    async def start(self) -> None:
        """Do nothing."""

    def watches(self) -> list[Coroutine[Any, Any, object]]:
        """Return nothing: a session that no agent keeps expires."""
        return []

    def metrics(self) -> dict[str, float]:
        """Return nothing: the training groups count the sessions."""
        return {}

    def most_rollouts(self) -> int:
        """Return the number of sessions that may be open at a time."""
        return self._config.max_open

    async def counts(self) -> dict[str, int]:
        """Return nothing: the store counts the sessions."""
        return {}
