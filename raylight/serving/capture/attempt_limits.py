"""Attempts that may make no further calls: their API keys are revoked, or their budgets are spent."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from cachetools import LRUCache

from raylight.engines.capture_context import AttemptScope, CaptureContext, Sample
from raylight.http.errors import RequestError
from raylight.types import Budget

if TYPE_CHECKING:
    from raylight.store.tables.budgets import Allowance

REMEMBERED = 10_000
"""Finished attempts that are remembered, and attempts whose unrecorded calls are."""

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


TRUNCATED_CODE = "rollout_truncated"
"""Code of the error of a call beyond a budget."""
CheckBudgets: TypeAlias = Callable[[str, str, Mapping[str, int]], Awaitable["Allowance"]]
"""Returns what an attempt may still use; normally `StoreClient.check_budgets`."""


class RolloutTruncatedError(RequestError):
    """A call of an attempt that has spent a budget.

    No SDK retries status 400. LiteLLM would raise a connection error for 403.
    """

    def __init__(self, budget: Budget) -> None:
        super().__init__(
            f"the rollout has spent its budget {budget} and is truncated; it may make no further model calls "
            f"({TRUNCATED_CODE})",
            400,
            code=TRUNCATED_CODE,
        )


class CallBudgets:
    """Asks the store before each call of an attempt with budgets.

    The record of a call reaches the store after the agent has its answer. So each question has the tokens of
    this replica's calls that the store may not have yet.
    """

    def __init__(self, check: CheckBudgets) -> None:
        self._check = check
        self._unrecorded: LRUCache[tuple[str, str], dict[str, Callable[[], int]]] = LRUCache(REMEMBERED)

    async def limit(self, context: CaptureContext) -> None:
        """Limit the request's tokens to what is left, and count them from now on.

        Raises:
            RolloutTruncatedError: a budget is spent, or the rest is less than a token for each choice.
        """
        scope = context.scope
        calls = self._unrecorded.setdefault((scope.rollout_id, scope.attempt_id), {})
        tokens = {call_id: count() for call_id, count in calls.items()}
        spent, left, recorded = await self._check(scope.rollout_id, scope.attempt_id, tokens)
        for call_id in recorded:
            calls.pop(call_id, None)
        if left is not None and left < len(context.keys):
            spent = spent or "max_tokens"
        if spent is not None:
            raise RolloutTruncatedError(spent)
        if left is not None:
            context.max_tokens = left // len(context.keys)
        for index, key in enumerate(context.keys):
            calls[key.call_id] = functools.partial(_count_tokens, context.samples, index)


def _count_tokens(samples: Mapping[int, Sample], index: int) -> int:
    """Return the number of tokens that a choice has sampled so far."""
    return len(samples[index].output_ids) if index in samples else 0
