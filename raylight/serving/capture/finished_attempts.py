"""Attempts known to have finished: their API keys are revoked."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeAlias

from cachetools import LRUCache

from raylight.engines.capture_context import AttemptScope

REMEMBERED = 10_000
"""Finished attempts that are remembered."""

IsFinished: TypeAlias = Callable[[str, str], Awaitable[bool]]
"""Returns True if an attempt of a rollout has finished; normally `StoreClient.is_attempt_finished`."""


class FinishedAttempts:
    """Remembers finished attempts; none of them resumes.

    Args:
        is_finished: asks the store. None: only attempts that were added are known.
    """

    def __init__(self, is_finished: IsFinished | None = None) -> None:
        self._is_finished = is_finished
        self._known: LRUCache[tuple[str, str], bool] = LRUCache(REMEMBERED)

    def __contains__(self, scope: AttemptScope) -> bool:
        return (scope.rollout_id, scope.attempt_id) in self._known

    def add(self, scope: AttemptScope) -> None:
        """Remember that an attempt has finished."""
        self._known[scope.rollout_id, scope.attempt_id] = True

    async def check(self, scope: AttemptScope) -> bool:
        """Return True if an attempt has finished, asking the store unless that is known.

        For requests that open no call: the store rejects the calls of finished attempts by itself.
        """
        if scope in self:
            return True
        if self._is_finished is None or not await self._is_finished(scope.rollout_id, scope.attempt_id):
            return False
        self.add(scope)
        return True
