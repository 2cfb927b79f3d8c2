"""Conversations in tokens: prompts that continue a conversation with the tokens that were really sampled.

After each answer, a conversation's messages and tokens are stored. A request whose messages continue a stored
conversation gets a spliced prompt: the stored tokens, followed by the rendered new turns. So a chat template
cannot change past turns. Law: a spliced prompt begins with the tokens of the conversation that it continues.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Literal

from cachetools import LRUCache

from raylight.engines.capture_context import AttemptScope
from raylight.errors import ImageError
from raylight.images.image import Image
from raylight.serving.conversations.drift import NEW, describe_tools, diagnose
from raylight.serving.conversations.message_forms import (
    MessageForm,
    UnsupportedMessage,
    answer_form,
    digest_of,
    message_forms,
)
from raylight.serving.conversations.rendering import Renderer, UnsupportedTemplate
from raylight.serving.conversations.rewrites import Rewrites
from raylight.serving.conversations.turn_tree import Branches, Message, StoredTurn, TokenPrefix, prune
from raylight.types import DRIFTS, HistoryNote, IntArray, JsonObject, Tokenizer

if TYPE_CHECKING:
    from raylight.images.model_inputs import ModelImages

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
CAPACITY = 64 * 2**20
"""Memory of the conversations of all attempts on a replica, in bytes."""
MAX_ROOTS = 8
"""Number of settings, the latest ones, whose conversations a request with other settings is compared with."""


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
class Prompt:
    """The prompt of a request."""

    tokens: list[int] | None
    """None if the engine has to render the messages."""
    source: Literal["rendered", "spliced", "partly"]
    """As `CaptureContext.prompt`."""
    note: HistoryNote
    """Relation of the request to the stored conversations."""


@dataclass(frozen=True)
class SentConversation:
    """The messages of a request in canonical form."""

    scope: AttemptScope
    messages: Sequence[Any]
    forms: Sequence[MessageForm]
    """Empty if the request cannot be spliced."""
    root: bytes
    """Digest of all inputs of the chat template except the messages. The model's name is not part of it: a
    policy may be served under a new name (the next version of its adapter) and continue a conversation."""
    tools: Any
    variables: JsonObject
    """Variables of the chat template."""
    problem: str = ""
    """Reason for which the request cannot be spliced."""


@dataclass
class _Root:
    """Conversations with the same inputs of the chat template except the messages."""

    agent: str | None
    tools: Any
    turns: Branches = field(default_factory=Branches)


@dataclass
class _AttemptConversations:
    roots: dict[bytes, _Root] = field(default_factory=dict)
    size: int = 0


class Conversations:
    """Stored conversations of all attempts on a replica, for one event loop.

    The state after every answer is stored, so that an agent may return to an earlier turn and continue
    differently. The agents of an attempt do not share conversations, because each agent's trajectories are
    trained separately.

    Args:
        tokenizer: Hugging Face tokenizer with the chat template that the engine renders with.
        capacity_bytes: memory of all attempts. Beyond it, the least recently used attempts are dropped, and
            of a single attempt the least recently used conversations.
        template_kwargs: the engine's defaults for `chat_template_kwargs`.
        tolerate_rewrites: continue a conversation whose messages were rewritten with the same meaning (see
            `rewrites`).
        images: converts images to the model's tokens; None for a model that takes none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        capacity_bytes: int = CAPACITY,
        template_kwargs: Mapping[str, object] | None = None,
        *,
        tolerate_rewrites: bool = True,
        images: ModelImages | None = None,
    ) -> None:
        self.counts = SpliceCounts()
        self._images = images
        self._renderer = Renderer(tokenizer, images)
        self._rewrites = Rewrites(tokenizer) if tolerate_rewrites else None
        self._defaults = dict(template_kwargs or {})
        self._attempts: LRUCache[tuple[str, str], _AttemptConversations] = LRUCache(
            capacity_bytes, getsizeof=lambda attempt: attempt.size
        )
        self._reasons: set[str] = set()
        self._requests = 0
        """Number of walks through the stored turns."""

    def read(self, scope: AttemptScope, body: JsonObject) -> SentConversation:
        """Return the messages of a chat request in canonical form."""
        messages, tools = body.get("messages"), body.get("tools") or None
        problem, root = "", b""
        forms: list[MessageForm] = []
        variables: JsonObject = {}
        if _changes_prompt(body):
            problem = "the request has fields that change the prompt"
        else:
            try:
                variables = self._variables(body)
                root = digest_of([scope.agent, tools, variables])
                forms = message_forms(messages or [])
            except UnsupportedMessage as error:
                problem = str(error)
                logger.debug("a request cannot be continued in tokens, and is rendered: %s", error)
        return SentConversation(scope, messages or [], forms, root, tools, variables, problem)

    def prompt(self, sent: SentConversation, files: Mapping[str, Image] | None = None) -> Prompt:
        """Return the prompt of a request: spliced if it continues a stored conversation.

        Args:
            files: the request's images, by digest.
        """
        try:
            prompt = self._prompt(sent, files)
        except UnsupportedTemplate as error:
            self.counts.refused_by_template += 1
            self._warn_once(str(error))
            return Prompt(None, "rendered", HistoryNote("template", f"the chat template: {error}"))
        if prompt.source == "spliced":
            self.counts.spliced += 1
        elif prompt.source == "partly":
            self.counts.partly += 1
        else:
            self.counts.rendered += 1
        return prompt

    async def prepare(self, files: Mapping[str, Image]) -> None:
        """Convert the images of a request in a thread, before `prompt`: one takes up to a second."""
        if self._images is not None:
            with suppress(ImageError):  # the engine reports it
                await asyncio.to_thread(self._images.prepare, files.values())

    def unknown_answer(self, sent: SentConversation) -> bytes | None:
        """Return the key of a request's last answer if it could be spliced but is not stored here.

        Another replica may have sampled it.
        """
        answers = [n for n, form in enumerate(sent.forms[:-1]) if form.is_answer]
        if not answers:
            return None
        steps = self._walk(sent)
        if len(steps) > answers[-1] and steps[answers[-1]].prefix is not None:
            return None
        digests = b"".join(form.digest for form in sent.forms[: answers[-1] + 1])
        return blake2b(sent.root + digests, digest_size=16).digest()

    def remember(
        self, sent: SentConversation, message: Mapping[str, object], tokens: IntArray, prompt_length: int
    ) -> None:
        """Store the conversation of a request and its answer, replacing an equal one.

        Args:
            message: the answer.
            tokens: token ids of prompt and answer, exactly as sampled, shape (tokens,).
            prompt_length: number of tokens of the prompt.
        """
        answer = _answer_form(message)
        if not len(tokens) or not sent.forms or answer is None:
            return
        attempt = self._attempts.get(_attempt_key(sent.scope)) or _AttemptConversations()
        root = attempt.roots.get(sent.root)
        if root is None:
            root = attempt.roots[sent.root] = _Root(sent.scope.agent, sent.tools)
        turns = root.turns
        steps = self._walk_from(turns, sent)
        steps = steps[: _last_sampled(steps, len(sent.forms)) + 1]
        for turn in [*steps, *map(StoredTurn, sent.forms[len(steps) :])]:
            turns = self._store(attempt, turns, turn).next
        stored = turns.find(answer)
        prefixes = [turn.prefix for turn in [*steps, *([stored] if stored else [])] if turn.prefix]
        base = next((prefix for prefix in reversed(prefixes) if prefix.is_prefix_of(tokens)), None)
        if stored is not None and stored.prefix is base and base is not None and base.length == len(tokens):
            return
        suffix = tokens[base.length if base else 0 :].copy()
        prefix = TokenPrefix(base, suffix, len(tokens), len(tokens) - prompt_length)
        if stored is None:
            stored = self._store(attempt, turns, StoredTurn(answer))
        attempt.size -= stored.size
        stored.prefix, stored.note, stored.shown = prefix, None, None
        attempt.size += stored.size
        self._resize(sent.scope, attempt)

    def forget(self, scope: AttemptScope) -> None:
        """Drop all conversations of an attempt, of all its agents."""
        self._attempts.pop(_attempt_key(scope), None)

    def knows(self, sent: SentConversation, message: Mapping[str, object]) -> bool:
        """True if the conversation of a request's messages and its answer is stored."""
        answer = _answer_form(message)
        steps = self._walk(sent)
        if answer is None or not steps or len(steps) < len(sent.forms):
            return False
        stored = steps[-1].next.find(answer)
        return stored is not None and stored.prefix is not None

    def _prompt(self, sent: SentConversation, files: Mapping[str, Image] | None) -> Prompt:
        """Return a request's prompt.

        Raises:
            UnsupportedTemplate: the request continues a conversation, and the template does not allow it.
        """
        if not sent.forms:
            return Prompt(None, "rendered", HistoryNote("unsupported", sent.problem))
        steps = self._walk(sent)
        last = _last_sampled(steps, len(sent.forms))
        note = self._note(sent, steps, last)
        if last < 0:
            return Prompt(None, "rendered", note)
        self._store_rewritten(sent, steps[: last + 1])
        shown = [step.shown or [sent.messages[n]] for n, step in enumerate(steps[: last + 1])]
        before: list[Message] = [message for messages in shown for message in messages]
        prefix = steps[last].prefix
        assert prefix is not None
        tokens = self._renderer.extend(
            prefix.tokens(),
            [*before, *sent.messages[last + 1 :]],
            len(before) - len(shown[-1]),
            sent.tools,
            sent.variables,
            files,
        )
        complete = not any(form.is_answer for form in sent.forms[last + 1 :])
        return Prompt(tokens, "spliced" if complete else "partly", note)

    def _note(self, sent: SentConversation, steps: list[StoredTurn], last: int) -> HistoryNote:
        """Return the relation of a request to the stored conversations, from its walk through them."""
        attempt = self._attempts.get(_attempt_key(sent.scope))
        if attempt is None:
            return NEW
        root = attempt.roots.get(sent.root)
        if last < 0 and (changed := self._changed_root(sent, attempt)):
            return changed
        turns = steps[-1].next if steps else root.turns if root else Branches()
        note = diagnose(turns, len(steps), sent.forms)
        if note is not NEW or last < 0:
            return note
        rewritten = next(((n, step.note) for n, step in enumerate(steps[: last + 1]) if step.note), None)
        return rewritten[1]._replace(message=rewritten[0]) if rewritten else HistoryNote("continued")

    def _changed_root(self, sent: SentConversation, attempt: _AttemptConversations) -> HistoryNote | None:
        """Return a note if a request continues a conversation that had other tools or template variables."""
        others = [root for key, root in attempt.roots.items() if key != sent.root]
        for root in others[: -MAX_ROOTS - 1 : -1]:
            if root.agent != sent.scope.agent:
                continue
            if _last_sampled(self._walk_from(root.turns, sent), len(sent.forms)) < 0:
                continue
            if root.tools != sent.tools:
                return describe_tools(root.tools, sent.tools)
            return HistoryNote("variables_changed", DRIFTS["variables_changed"])
        return None

    def _walk(self, sent: SentConversation) -> list[StoredTurn]:
        """Return the stored turns of a request's first messages, up to the first message without one."""
        attempt = self._attempts.get(_attempt_key(sent.scope))
        root = attempt.roots.get(sent.root) if attempt else None
        return self._walk_from(root.turns, sent) if root else []

    def _walk_from(self, turns: Branches, sent: SentConversation) -> list[StoredTurn]:
        steps: list[StoredTurn] = []
        self._requests += 1
        for form in sent.forms:
            if not turns:
                break
            turn = turns.find(form)
            if turn is None and self._rewrites is not None:
                turn = self._rewrites.find(turns, form)
            if turn is None:
                break
            turn.used = self._requests
            steps.append(turn)
            turns = turn.next
        return steps

    def _store(self, attempt: _AttemptConversations, turns: Branches, turn: StoredTurn) -> StoredTurn:
        """Store a turn; return it, or the one that is already stored for its form."""
        stored = turns.find(turn.form)
        if stored is None:
            turns.add(turn)
            attempt.size += turn.size
            stored = turn
        stored.used = self._requests
        return stored

    def _store_rewritten(self, sent: SentConversation, steps: list[StoredTurn]) -> None:
        """Store the rewritten messages of a walk, so that later requests find them at once."""
        attempt = self._attempts[_attempt_key(sent.scope)]
        turns, before = attempt.roots[sent.root].turns, attempt.size
        for turn in steps:
            turns = self._store(attempt, turns, turn).next
        if attempt.size != before:
            self._resize(sent.scope, attempt)

    def _resize(self, scope: AttemptScope, attempt: _AttemptConversations) -> None:
        self._attempts.pop(_attempt_key(scope), None)  # inserted again, with its new size
        if attempt.size > self._attempts.maxsize:
            attempt.size = prune((root.turns for root in attempt.roots.values()), self._attempts.maxsize // 2)
            attempt.roots = {key: root for key, root in attempt.roots.items() if root.turns}
        with suppress(ValueError):  # larger than the whole capacity
            self._attempts[_attempt_key(scope)] = attempt

    def _variables(self, body: JsonObject) -> JsonObject:
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


def _answer_form(message: Mapping[str, object]) -> MessageForm | None:
    try:
        return answer_form(message)
    except UnsupportedMessage:
        return None


def _last_sampled(steps: Sequence[StoredTurn], messages: int) -> int:
    """Return the index of the last sampled answer of a walk, which is not the last message; -1 for none."""
    indices = reversed(range(min(len(steps), messages - 1)))
    return next((n for n in indices if steps[n].prefix is not None), -1)


def _changes_prompt(body: Mapping[str, object]) -> bool:
    return (
        any(body.get(name) for name in PROMPT_FIELDS)
        or body.get("add_generation_prompt") is False
        or not isinstance(body.get("messages"), list)
        or not isinstance(body.get("chat_template_kwargs"), dict | None)
    )
