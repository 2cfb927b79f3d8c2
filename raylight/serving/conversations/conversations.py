"""Conversations in tokens: prompts that continue a conversation with the tokens that were really sampled.

After each answer, a conversation's tokens are stored under a key of its messages. A request whose messages
continue a stored conversation gets a spliced prompt: the stored tokens, followed by the rendered new turns.
So a chat template cannot change past turns. Law: a spliced prompt begins with the tokens of the conversation
that it continues.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from raylight.engines.capture_context import AttemptScope
from raylight.serving.conversations.message_keys import UnsupportedMessage, message_keys, root_key
from raylight.serving.conversations.rendering import Renderer, UnsupportedTemplate

logger = logging.getLogger(__name__)

PROMPT_FIELDS = (
    "add_special_tokens",
    "chat_template",
    "continue_final_message",
    "documents",
    "echo",
    "kv_transfer_params",
    "mm_processor_kwargs",
    "prompt_embeds",
    "truncate_prompt_tokens",
)
"""Request fields that make a prompt differ from the rendered messages; such requests are not spliced."""
OVERHEAD = 64
"""Memory of a stored conversation beside its tokens, in tokens."""


@dataclass
class SpliceCounts:
    """Numbers of prompts by their source."""

    spliced: int = 0
    partly: int = 0
    """Spliced, but with rendered answers after the stored tokens."""
    rendered: int = 0
    """The conversation was not stored, or the request cannot be spliced."""
    refused_by_template: int = 0
    """The chat template does not allow splicing."""


@dataclass(frozen=True)
class SplicedPrompt:
    """A prompt that begins with the tokens of a stored conversation."""

    tokens: list[int]
    complete: bool
    """True if all answers in it are sampled tokens; False if later answers had to be rendered."""


@dataclass(frozen=True, slots=True, eq=False)
class _StoredPrefix:
    """The tokens of a conversation up to an answer, stored as the difference to an earlier prefix."""

    base: _StoredPrefix | None
    suffix: NDArray[np.uint32]
    length: int
    """Number of tokens, including those of `base`."""

    def tokens(self) -> list[int]:
        parts, prefix = [], self
        while True:
            parts.append(prefix.suffix)
            if prefix.base is None:
                return np.concatenate(parts[::-1]).tolist()
            prefix = prefix.base

    def is_prefix_of(self, tokens: NDArray[np.uint32]) -> bool:
        """True if `tokens` begins with this prefix."""
        prefix: _StoredPrefix | None = self
        while prefix is not None:
            start = prefix.length - len(prefix.suffix)
            if not np.array_equal(prefix.suffix, tokens[start : prefix.length]):
                return False
            prefix = prefix.base
        return True


@dataclass
class _AttemptConversations:
    prefixes: dict[bytes, _StoredPrefix] = field(default_factory=dict)
    size: int = 0


class Conversations:
    """Stored conversations of all attempts on a replica, for one event loop.

    The state after every answer is stored, so that an agent may return to an earlier turn and continue
    differently. The agents of an attempt do not share conversations, because each agent's trajectories are
    trained separately.

    Args:
        tokenizer: Hugging Face tokenizer with the chat template that the engine renders with.
        capacity_tokens: number of tokens stored for all attempts; beyond it, the least recently used attempt
            is dropped.
        template_kwargs: the engine's defaults for `chat_template_kwargs`.
    """

    def __init__(
        self,
        tokenizer: Any,
        capacity_tokens: int = 20_000_000,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.counts = SpliceCounts()
        self._renderer = Renderer(tokenizer)
        self._defaults = dict(template_kwargs or {})
        self._attempts: LRUCache[tuple[str, str], _AttemptConversations] = LRUCache(
            capacity_tokens, getsizeof=lambda attempt: attempt.size
        )
        self._reasons: set[str] = set()

    def splice(self, scope: AttemptScope, body: Mapping[str, Any]) -> SplicedPrompt | None:
        """Return a chat request's spliced prompt; None if it continues no stored conversation."""
        try:
            prompt = self._splice(scope, body)
        except UnsupportedTemplate as error:
            self.counts.refused_by_template += 1
            self._warn_once(str(error))
            return None
        if prompt is None:
            self.counts.rendered += 1
        elif prompt.complete:
            self.counts.spliced += 1
        else:
            self.counts.partly += 1
        return prompt

    def unknown_answer(self, scope: AttemptScope, body: Mapping[str, Any]) -> bytes | None:
        """Return the key of a request's last answer if it could be spliced but is not stored here.

        Another replica may have sampled it.
        """
        keys = self._keys(scope, body)
        if not keys:
            return None
        answers = [key for key, m in zip(keys[:-1], body["messages"], strict=False) if _is_answer(m)]
        return answers[-1] if answers and not self._has(scope, answers[-1]) else None

    def remember(
        self, scope: AttemptScope, body: Mapping[str, Any], message: Mapping[str, Any], tokens: list[int]
    ) -> None:
        """Store a conversation under the key of a request's messages and its answer, replacing an equal one.

        Args:
            message: the answer.
            tokens: token ids of prompt and answer, exactly as sampled.
        """
        keys = self._keys(scope, body, message)
        if not tokens or not keys:
            return
        attempt = self._attempts.get(_attempt_key(scope)) or _AttemptConversations()
        all_tokens = np.array(tokens, dtype=np.uint32)
        base = next(
            (
                prefix
                for key in reversed(keys)
                if (prefix := attempt.prefixes.get(key)) and prefix.is_prefix_of(all_tokens)
            ),
            None,
        )
        if base is not None and base.length == len(tokens) and attempt.prefixes.get(keys[-1]) is base:
            return
        stored = _StoredPrefix(base, all_tokens[base.length if base else 0 :].copy(), len(tokens))
        attempt.prefixes[keys[-1]] = stored
        attempt.size += len(stored.suffix) + OVERHEAD
        self._attempts.pop(_attempt_key(scope), None)  # inserted again below, with its new size
        with suppress(ValueError):  # larger than the whole capacity
            self._attempts[_attempt_key(scope)] = attempt

    def forget(self, scope: AttemptScope) -> None:
        """Drop all conversations of an attempt, of all its agents."""
        self._attempts.pop(_attempt_key(scope), None)

    def knows(self, scope: AttemptScope, body: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
        """True if the conversation of a request's messages and its answer is stored."""
        keys = self._keys(scope, body, message)
        return bool(keys) and self._has(scope, keys[-1])

    def _splice(self, scope: AttemptScope, body: Mapping[str, Any]) -> SplicedPrompt | None:
        attempt = self._attempts.get(_attempt_key(scope))
        if attempt is None:
            return None
        keys = self._keys(scope, body)
        for answer_index in reversed(range(len(keys) - 1)):
            if prefix := attempt.prefixes.get(keys[answer_index]):
                messages = body["messages"]
                tokens = self._renderer.extend(
                    prefix.tokens(), messages, answer_index, body.get("tools"), self._kwargs(body)
                )
                return SplicedPrompt(tokens, complete=not any(map(_is_answer, messages[answer_index + 1 :])))
        return None

    def _has(self, scope: AttemptScope, key: bytes) -> bool:
        attempt = self._attempts.get(_attempt_key(scope))
        return attempt is not None and key in attempt.prefixes

    def _keys(self, scope: AttemptScope, body: Mapping[str, Any], *answer: Mapping[str, Any]) -> list[bytes]:
        """Return the keys of a request's messages and its answer; empty if it cannot be spliced."""
        if _changes_prompt(body):
            return []
        try:
            root = root_key(scope.agent, body.get("tools"), self._kwargs(body))
            return message_keys(root, [*body["messages"], *answer])
        except UnsupportedMessage as error:
            logger.debug(
                "a conversation cannot be stored in tokens, and is rendered by the engine: %s", error
            )
            return []

    def _kwargs(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return the template's variables, with the same defaults as vLLM."""
        requested, effort = body.get("chat_template_kwargs") or {}, body.get("reasoning_effort")
        if effort is None:
            return self._defaults | requested
        return (
            self._defaults | {"enable_thinking": effort != "none"} | requested | {"reasoning_effort": effort}
        )

    def _warn_once(self, reason: str) -> None:
        """Log each reason once, because the template gives the same one for every turn."""
        if reason not in self._reasons and len(self._reasons) < 10:
            self._reasons.add(reason)
            logger.warning(
                "conversations are rendered, because the chat template does not allow splicing: %s",
                reason,
            )


def _attempt_key(scope: AttemptScope) -> tuple[str, str]:
    return scope.rollout_id, scope.attempt_id


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant"


def _changes_prompt(body: Mapping[str, Any]) -> bool:
    return (
        any(body.get(name) for name in PROMPT_FIELDS)
        or body.get("add_generation_prompt") is False
        or not isinstance(body.get("messages"), list)
        or not isinstance(body.get("chat_template_kwargs"), dict | None)
    )
