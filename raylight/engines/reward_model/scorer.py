"""Scores of conversations, by an engine that scores token rows."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from raylight.errors import RewardModelError
from raylight.rewards.scoring_model import RewardModelInput
from raylight.types import JsonObject, Tokenizer

if TYPE_CHECKING:
    from raylight.engines.reward_model.engine import RewardModelEngine


class ScoredConversation(NamedTuple):
    """The score of a conversation."""

    score: float | None
    """None for a conversation that is too long."""
    length: int
    """Number of tokens of the whole conversation."""


class ConversationScorer:
    """Renders conversations with the model's chat template, as TRL's RewardTrainer does, and scores them."""

    def __init__(self, engine: RewardModelEngine) -> None:
        self._engine = engine
        self._lock = asyncio.Lock()
        """Held while the tokenizer is used, which two threads must not share."""

    async def score(
        self, conversations: Sequence[RewardModelInput], truncate: bool
    ) -> list[ScoredConversation]:
        """Score conversations.

        Args:
            truncate: score the last tokens of a conversation that is too long, which has the answer.

        Raises:
            RewardModelError: a conversation has something else than text, the template rejects it, or its
                score is not finite.
        """
        async with self._lock:
            tokenizer = self._engine.tokenizer
            whole = await asyncio.to_thread(
                lambda: [conversation_tokens(tokenizer, x) for x in conversations]
            )
        limit = self._engine.max_model_len
        assert limit is not None, "an engine of a reward model has a limit"
        chosen = [index for index, ids in enumerate(whole) if truncate or len(ids) <= limit]
        scores = await self._engine.classify([whole[index][-limit:] for index in chosen])
        for score in scores:
            if not math.isfinite(score):
                raise RewardModelError(
                    f"the reward model gave a conversation the score {score}; if its dtype is float16, set "
                    "dtype='bfloat16' or 'float32', else look at its weights"
                )
        found = dict(zip(chosen, scores, strict=True))
        return [ScoredConversation(found.get(index), len(ids)) for index, ids in enumerate(whole)]


def conversation_tokens(tokenizer: Tokenizer, conversation: RewardModelInput) -> list[int]:
    """Return the tokens of a conversation, as the chat template of a reward model shows it.

    Raises:
        RewardModelError: it has something else than text, or the template rejects it.
    """
    messages = list(map(_for_template, conversation.messages))
    tools: list[Any] | None = conversation.tools
    try:
        text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    except Exception as error:  # a template is the model authors' program and may raise anything
        raise RewardModelError(
            f"the chat template of the reward model rejects a conversation of {len(messages)} messages: "
            f"{type(error).__name__}: {error}; change its chat_template, or the messages in your group "
            "reward"
        ) from None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise RewardModelError("the chat template of the reward model shows nothing of a conversation")
    return ids


def _for_template(message: JsonObject) -> JsonObject:
    """Convert a message for the template: content as one string, arguments of calls as mappings."""
    content = message.get("content")
    if isinstance(content, list):
        if others := {part.get("type") for part in content if part.get("type") != "text"}:
            raise RewardModelError(
                f"a conversation has {', '.join(sorted(map(str, others)))}, and a reward model reads text; "
                "leave such messages out in your group reward"
            )
        content = "\n".join(part["text"] for part in content)
    converted = dict(message) | {"content": content or ""}
    if message.get("role") == "developer":
        converted["role"] = "system"  # templates know only the older name
    if calls := message.get("tool_calls"):
        converted["tool_calls"] = [
            call | {"function": call["function"] | {"arguments": _mapping(call["function"]["arguments"])}}
            for call in calls
        ]
    return converted


def _mapping(arguments: object) -> Any:
    """Return the arguments of a call as a mapping; unchanged if they are none, as a model may write."""
    if not isinstance(arguments, str):
        return arguments
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments
