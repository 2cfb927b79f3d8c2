"""Limits of the calls of attempts with budgets."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from cachetools import LRUCache

from raylight.engines.capture_context import CaptureContext, Sample
from raylight.http.errors import RequestError
from raylight.types import Budget

if TYPE_CHECKING:
    from raylight.store.budgets import Allowance

REMEMBERED = 10_000
"""Attempts whose unrecorded calls are remembered."""
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
