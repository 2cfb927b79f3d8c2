"""Bringing an attempt's conversations back from the store, where another replica had them until now."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

from raylight.engines.capture_context import AttemptScope
from raylight.errors import UnknownIdError
from raylight.serving.conversations.conversations import Conversations
from raylight.store.reading import ChatTurn

logger = logging.getLogger(__name__)

History: TypeAlias = Callable[[str, str], Awaitable[list[ChatTurn]]]
"""Of a rollout and an attempt; normally `StoreClient.chat_history`."""
REMEMBERED = 10_000
"""Answers of which it is known that they were asked for."""


class ConversationLoader:
    """Asks for the history of an attempt, and has the conversations remember what they do not know of it.

    It asks once for an answer: one that is not in the store, as the agent wrote it itself, comes again with every later request.

    Args:
        timeout_s: a store that takes longer is not waited for: the prompt is rendered then, and the next call asks again.
    """

    def __init__(self, conversations: Conversations, history: History, timeout_s: float = 10.0) -> None:
        self._conversations = conversations
        self._history = history
        self._timeout_s = timeout_s
        self._asked: OrderedDict[tuple[str, str, bytes], asyncio.Task[None]] = OrderedDict()

    async def __call__(self, scope: AttemptScope, missing: bytes) -> None:
        """Return when the attempt's conversations are known, as far as the store has them. Calls at once ask together.

        Args:
            missing: the key of the answer that is asked for.
        """
        name = (scope.rollout_id, scope.attempt_id, missing)
        asking = self._asked.get(name)
        if asking is None:
            asking = self._asked[name] = asyncio.create_task(self._ask(scope, missing))
            while len(self._asked) > REMEMBERED:
                self._asked.popitem(last=False)
        self._asked.move_to_end(name)
        if not asking.done():
            await asyncio.wait([asking])  # one who leaves takes nothing from the others

    async def _ask(self, scope: AttemptScope, missing: bytes) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                turns = await self._history(scope.rollout_id, scope.attempt_id)
        except UnknownIdError:
            return  # there is no such attempt; the store will say so of the call as well
        except Exception as error:
            logger.warning(
                "the conversations of attempt %s are not known, and are rendered: %s", scope.attempt_id, error
            )
            self._asked.pop((scope.rollout_id, scope.attempt_id, missing), None)
            return
        known = self._conversations
        told = [(replace(scope, agent=turn.agent), turn) for turn in turns]
        new = [(inside, turn) for inside, turn in told if not known.knows(inside, turn.request, turn.answer)]
        for inside, turn in new:  # of equal ones the latest counts, and those from here are later
            known.remember(inside, turn.request, turn.answer, turn.tokens)
