"""The agents outside a run, in place of its runners."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from raylight.config import SessionConfig


class OutsideAgents:
    """Agents that open sessions at the served model. The run starts none of them."""

    def __init__(self, config: SessionConfig) -> None:
        self._config = config

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
