"""Which attempts are over: their keys open nothing any more."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from raylight.engines.capture_context import AttemptScope

REMEMBERED = 10_000
"""Attempts of which it is known that they are over."""

Ask: TypeAlias = Callable[[str, str], Awaitable[bool]]
"""Whether an attempt of a rollout is over; normally `StoreClient.is_attempt_finished`."""


class FinishedAttempts:
    """Remembers attempts that are over; an attempt never comes back.

    Args:
        ask: asks the store. None: only what calls brought to light is known.
    """

    def __init__(self, ask: Ask | None = None) -> None:
        self._ask = ask
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()

    def __contains__(self, scope: AttemptScope) -> bool:
        return (scope.rollout_id, scope.attempt_id) in self._known

    def add(self, scope: AttemptScope) -> None:
        self._known[scope.rollout_id, scope.attempt_id] = None
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)

    async def asked(self, scope: AttemptScope) -> bool:
        """Whether an attempt is over, by the store's word. For requests that open no call, of which the store would not hear."""
        if (
            scope not in self
            and self._ask is not None
            and await self._ask(scope.rollout_id, scope.attempt_id)
        ):
            self.add(scope)
        return scope in self
