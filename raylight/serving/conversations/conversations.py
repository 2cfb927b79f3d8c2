"""Conversations as tokens: tokens in, tokens out.

After an answer, a conversation is known under its messages. A request whose messages go on from there gets a prompt made of the
very tokens that were prompted and sampled, and of its new turns, rendered: no template can change the past. Law: such a prompt
begins with the tokens of the conversation that it continues.
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
from raylight.serving.conversations.canonical import NotCanonical, message_keys, root_key
from raylight.serving.conversations.rendering import Renderer, TemplateRefusal

logger = logging.getLogger(__name__)

SPECIAL = (
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
"""Fields by which a request asks for a prompt that is not simply its messages, rendered."""
OVERHEAD = 64
"""What a conversation takes besides its tokens, in tokens."""


@dataclass
class SpliceCounts:
    """What became of the requests' prompts."""

    spliced: int = 0
    partly: int = 0
    """Spliced, but with answers after the tokens that were known; these were rendered."""
    rendered: int = 0
    """Nothing was known of the conversation, or the request is not one to splice."""
    refused_by_template: int = 0


@dataclass(frozen=True)
class Splice:
    """A prompt that begins with the tokens of a conversation."""

    tokens: list[int]
    whole: bool
    """Whether no answer had to be rendered; otherwise there are some after the last one that is known."""


@dataclass(frozen=True, slots=True, eq=False)
class _Turns:
    """A conversation up to an answer, stored from where it leaves an earlier one."""

    base: _Turns | None
    rest: NDArray[np.uint32]
    total: int
    """Number of tokens, those of `base` included."""

    def tokens(self) -> list[int]:
        parts, turns = [], self
        while True:
            parts.append(turns.rest)
            if turns.base is None:
                return np.concatenate(parts[::-1]).tolist()
            turns = turns.base

    def begins(self, tokens: NDArray[np.uint32]) -> bool:
        """Whether the other tokens begin with these."""
        turns: _Turns | None = self
        while turns is not None:
            if not np.array_equal(turns.rest, tokens[turns.total - len(turns.rest) : turns.total]):
                return False
            turns = turns.base
        return True


@dataclass
class _Attempt:
    known: dict[bytes, _Turns] = field(default_factory=dict)
    size: int = 0


class Conversations:
    """The conversations of attempts, for one event loop.

    Every answer's end is kept, so that an agent may go back to an earlier turn and go on differently. The agents of an attempt
    do not share conversations: each is trained on its own.

    Args:
        tokenizer: of Hugging Face; its chat template is the one that the engine renders with.
        capacity_tokens: how many tokens are kept, of all attempts; the attempt that was not used for longest is forgotten first.
        template_kwargs: the engine's own defaults for `chat_template_kwargs`.
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
        self._attempts: LRUCache[tuple[str, str], _Attempt] = LRUCache(
            capacity_tokens, getsizeof=lambda attempt: attempt.size
        )
        self._reasons: set[str] = set()

    def splice(self, scope: AttemptScope, body: Mapping[str, Any]) -> Splice | None:
        """The prompt of a chat request that continues a conversation of its attempt; None: let the engine render it."""
        try:
            prompt = self._spliced(scope, body)
        except TemplateRefusal as refusal:
            self.counts.refused_by_template += 1
            self._tell(str(refusal))
            return None
        if prompt is None:
            self.counts.rendered += 1
        elif prompt.whole:
            self.counts.spliced += 1
        else:
            self.counts.partly += 1
        return prompt

    def missing(self, scope: AttemptScope, body: Mapping[str, Any]) -> bytes | None:
        """The last answer in a request, if it could be continued in tokens but is not known here: a key that stands for it and
        for all before it. Another replica may have sampled it."""
        keys = self._keys(scope, body)
        answers = (
            [key for key, message in zip(keys[:-1], body["messages"], strict=False) if _is_answer(message)]
            if keys
            else []
        )
        return answers[-1] if answers and not self._has(scope, answers[-1]) else None

    def remember(
        self, scope: AttemptScope, body: Mapping[str, Any], message: Mapping[str, Any], tokens: list[int]
    ) -> None:
        """Know a conversation by the messages of a request and the answer's; of equal ones the latest counts.

        Args:
            tokens: prompt and output, as they were sampled from and sampled.
        """
        keys = self._keys(scope, body, message)
        if not tokens or not keys:
            return
        attempt = self._attempts.get(_name(scope)) or _Attempt()
        all_tokens = np.array(tokens, dtype=np.uint32)
        base = next(
            (
                known
                for key in reversed(keys)
                if (known := attempt.known.get(key)) and known.begins(all_tokens)
            ),
            None,
        )
        if base is not None and base.total == len(tokens) and attempt.known.get(keys[-1]) is base:
            return
        turns = _Turns(base, all_tokens[base.total if base else 0 :].copy(), len(tokens))
        attempt.known[keys[-1]] = turns
        attempt.size += len(turns.rest) + OVERHEAD
        self._attempts.pop(_name(scope), None)  # it counts with its new size when it is put back
        with suppress(ValueError):  # it alone is larger than the capacity
            self._attempts[_name(scope)] = attempt

    def forget(self, scope: AttemptScope) -> None:
        """Forget all conversations of the attempt, whichever agent's."""
        self._attempts.pop(_name(scope), None)

    def knows(self, scope: AttemptScope, body: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
        """Whether the conversation is known that the messages of a request and the answer's make."""
        keys = self._keys(scope, body, message)
        return bool(keys) and self._has(scope, keys[-1])

    def _spliced(self, scope: AttemptScope, body: Mapping[str, Any]) -> Splice | None:
        attempt = self._attempts.get(_name(scope))
        if attempt is None:
            return None
        keys = self._keys(scope, body)
        for answered in reversed(range(len(keys) - 1)):
            if turns := attempt.known.get(keys[answered]):
                messages = body["messages"]
                tokens = self._renderer.extend(
                    turns.tokens(), messages, answered, body.get("tools"), self._kwargs(body)
                )
                return Splice(tokens, whole=not any(map(_is_answer, messages[answered + 1 :])))
        return None

    def _has(self, scope: AttemptScope, key: bytes) -> bool:
        attempt = self._attempts.get(_name(scope))
        return attempt is not None and key in attempt.known

    def _keys(self, scope: AttemptScope, body: Mapping[str, Any], *answer: Mapping[str, Any]) -> list[bytes]:
        """Of the messages of a request, and the answer's; none where they cannot be told, or are not all there is to the prompt."""
        if _is_special(body):
            return []
        try:
            root = root_key(scope.agent, body.get("tools"), self._kwargs(body))
            return message_keys(root, [*body["messages"], *answer])
        except NotCanonical as error:
            logger.debug("a conversation is left to the engine: %s", error)
            return []

    def _kwargs(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Variables of the template, as vLLM sets them."""
        kwargs, asked, effort = (
            self._defaults,
            body.get("chat_template_kwargs") or {},
            body.get("reasoning_effort"),
        )
        if effort is None:
            return kwargs | asked
        return kwargs | {"enable_thinking": effort != "none"} | asked | {"reasoning_effort": effort}

    def _tell(self, reason: str) -> None:
        """Each reason once: it is the template's, and comes again with every turn."""
        if reason not in self._reasons and len(self._reasons) < 10:
            self._reasons.add(reason)
            logger.warning(
                "a conversation was rendered anew, as the chat template lets none be continued in tokens: %s",
                reason,
            )


def _name(scope: AttemptScope) -> tuple[str, str]:
    return scope.rollout_id, scope.attempt_id


def _is_answer(message: Mapping[str, Any]) -> bool:
    return message["role"] == "assistant"


def _is_special(body: Mapping[str, Any]) -> bool:
    return (
        any(body.get(name) for name in SPECIAL)
        or body.get("add_generation_prompt") is False
        or not isinstance(body.get("messages"), list)
        or not isinstance(body.get("chat_template_kwargs"), dict | None)
    )
