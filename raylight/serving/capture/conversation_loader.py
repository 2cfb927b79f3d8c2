"""Loading of an attempt's conversations from the store, when another replica served the attempt before."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

from cachetools import LRUCache

from raylight.engines.capture_context import AttemptScope
from raylight.errors import UnknownIdError
from raylight.serving.conversations.conversations import Conversations
from raylight.store.reading import ChatTurn

logger = logging.getLogger(__name__)

History: TypeAlias = Callable[[str, str], Awaitable[list[ChatTurn]]]
"""Returns the turns of an attempt of a rollout; normally `StoreClient.chat_history`."""
REMEMBERED = 10_000
"""Answers whose loading is remembered."""


class ConversationLoader:
    """Loads the history of an attempt from the store into this replica's conversations.

    It loads once for each missing answer. An answer that the agent wrote itself is not in the store, and is
    in every later request.

    Args:
        timeout_s: longest wait for the store. After it the prompt is rendered, and the next call loads again.
    """

    def __init__(self, conversations: Conversations, history: History, timeout_s: float = 10.0) -> None:
        self._conversations = conversations
        self._history = history
        self._timeout_s = timeout_s
        self._loads: LRUCache[tuple[str, str, bytes], asyncio.Task[None] | None] = LRUCache(REMEMBERED)
        """Loads that run; None for one that has ended, whose task would take memory."""

    async def load(self, scope: AttemptScope, missing: bytes) -> None:
        """Load what the store has of an attempt's conversations. Concurrent calls for one answer load once.

        Args:
            missing: key of the answer that is not known here.
        """
        name = (scope.rollout_id, scope.attempt_id, missing)
        if name not in self._loads:
            self._loads[name] = asyncio.create_task(self._load(scope, missing))
        if (task := self._loads[name]) is not None:
            await asyncio.wait([task])  # a caller that is cancelled does not cancel the load of the others

    async def _load(self, scope: AttemptScope, missing: bytes) -> None:
        name = (scope.rollout_id, scope.attempt_id, missing)
        try:
            async with asyncio.timeout(self._timeout_s):
                turns = await self._history(scope.rollout_id, scope.attempt_id)
        except UnknownIdError:
            self._loads[name] = None
            return  # the store rejects the call for the same reason
        except Exception as error:
            logger.warning(
                "the conversations of attempt %s could not be loaded, and are rendered: %s",
                scope.attempt_id,
                error,
            )
            self._loads.pop(name, None)
            return
        self._loads[name] = None
        known = self._conversations
        read = [(known.read(replace(scope, agent=turn.agent), turn.request), turn) for turn in turns]
        new = [(sent, turn) for sent, turn in read if not known.knows(sent, turn.answer)]
        for sent, turn in new:  # the latest of equal ones counts, so that this replica's own must come later
            known.remember(sent, turn.answer, turn.tokens, turn.prompt_length)
