"""Middleware around the engine's application that records what is sampled for attempts, token for token.

Laws: the store has a call, or a hold of its attempt, before the first byte of its answer leaves. A
conversation is remembered before the last byte leaves, so that the next request finds it. Nothing is sampled
for a client that has disconnected, or for an attempt that is known to have finished. Every announced call is
closed, whatever happens, with everything that was sampled for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from typing import TypeAlias

import msgspec
from cachetools import LRUCache
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from raylight.engines.capture_context import (
    REQUESTED_MODEL_KEY,
    SCOPE,
    AttemptScope,
    CaptureContext,
    new_keys,
)
from raylight.engines.protocol import PROMPT_IDS, Engine
from raylight.errors import UnknownIdError
from raylight.experience.trajectories.off_policy import NEUTRAL, off_policy_parameters
from raylight.http.errors import RequestError, error_response
from raylight.http.field_bounds import MAX_CHOICES
from raylight.http.request import JsonRequest, json_request
from raylight.serving.capture.attempt_limits import CallBudgets, FinishedAttempts
from raylight.serving.capture.captured_request import CapturedRequest
from raylight.serving.capture.recorder import AttemptFinishedError, Recorder
from raylight.serving.capture.retry_cache import REPEATED_KEY
from raylight.serving.conversations.conversations import Conversations, SentConversation
from raylight.serving.dialects.registry import ChatDialect, CompletionsDialect
from raylight.serving.dialects.request_images import IMAGES_KEY, Images
from raylight.serving.dialects.translate import DIALECT_KEY
from raylight.store.reading import ChatTurn
from raylight.types import DRIFTS, REPEATED, HistoryNote, JsonObject

logger = logging.getLogger(__name__)

History: TypeAlias = Callable[[str, str], Awaitable[list[ChatTurn]]]
"""Returns the turns of an attempt of a rollout; normally `StoreClient.chat_history`."""
REMEMBERED_LOADS = 10_000
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
        self._loads: LRUCache[tuple[str, str, bytes], asyncio.Task[None] | None] = LRUCache(REMEMBERED_LOADS)
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


PROMPT_FIELD = "kv_transfer_params"
"""Field of a chat request in which engines take a prompt in tokens. Agents may not send it."""
TOKEN_IN = b"x-raylight-token-in"
"""Header of a request; with the value `off` its prompt is rendered from its messages alone."""
REQUEST_ID = b"x-request-id"
"""Header from which engines make the answer's id, so that the id names the call."""


class CaptureMiddleware:
    """ASGI middleware that records the chats and completions of attempts. Other requests pass through.

    Args:
        app: the engine's application.
        conversations: token histories for prompts; None has the engine render every prompt from its messages.
        history: loads conversations of an attempt that another replica served before.
        clock: seconds since the epoch.
        finished: finished attempts, shared with the gateway.
        budgets: limits the calls of attempts with budgets; None limits none.
        training_temperature: temperature of all calls of training rollouts, see `override`; None leaves the
            sampling to the agents.
        count_override: called for each request whose sampling was replaced.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: Engine,
        recorder: Recorder,
        conversations: Conversations | None,
        history: History | None = None,
        clock: Callable[[], float] = time.time,
        finished: FinishedAttempts | None = None,
        budgets: CallBudgets | None = None,
        training_temperature: float | None = None,
        count_override: Callable[[], None] = lambda: None,
    ) -> None:
        self._app = app
        self._engine = engine
        self._recorder = recorder
        self._conversations = conversations
        self._loader = ConversationLoader(conversations, history) if conversations and history else None
        self._clock = clock
        self._finished = finished or FinishedAttempts()
        self._budgets = budgets
        self._training_temperature, self._count_override = training_temperature, count_override

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        attempt = SCOPE.get()
        if (
            attempt is None
            or scope["type"] != "http"
            or scope["path"] not in (ChatDialect.path, CompletionsDialect.path)
            or scope["method"] != "POST"
        ):
            await self._app(scope, receive, send)
            return
        try:
            request = await json_request(scope, receive)
            await self._capture(attempt, request, scope, receive, send)
        except RequestError as error:
            await error_response(error)(scope, receive, send)  # outer layers reshape it for the dialect

    async def _capture(
        self, attempt: AttemptScope, request: JsonRequest, scope: AsgiScope, receive: Receive, send: Send
    ) -> None:
        """Announce the calls of a request, have the application answer it, and close them.

        Raises:
            RequestError: the request was rejected, and nothing has been sent.
        """
        if attempt in self._finished:
            raise AttemptFinishedError
        headers, overridden = dict(scope["headers"]), JsonObject()
        if attempt.trains and self._training_temperature is not None:
            fields, overridden = override(request.fields, self._training_temperature)
            request = JsonRequest(fields, receive)
            if overridden:
                self._count_override()
        context = self._context(attempt, scope, request.fields, overridden)
        images: Images = scope.get(IMAGES_KEY, {})
        is_chat = scope["path"] == ChatDialect.path
        if attempt.has_budgets and self._budgets is not None:
            await self._budgets.limit(context)
        sent = self._conversations.read(attempt, context.body) if self._conversations and is_chat else None
        known = await self._recorder.open(context.keys, context.start_time, may_cover=not attempt.has_budgets)
        is_translated = DIALECT_KEY in scope
        captured = CapturedRequest(
            context, known, send, self._clock, self._conversations, sent, is_translated
        )
        try:
            if is_chat and (tokens := await self._prompt(context, sent, headers, images)) is not None:
                request = JsonRequest({**context.body, PROMPT_FIELD: {PROMPT_IDS: tokens}}, receive)
            other_headers = [pair for pair in scope["headers"] if pair[0] != REQUEST_ID]
            call_id = context.keys[0].call_id.encode()
            inner = {**scope, "headers": [*other_headers, (REQUEST_ID, call_id)]}
            await captured.run(self._app, inner, request, receive)
        except AttemptFinishedError:
            self._finished.add(attempt)
            if self._conversations is not None:
                self._conversations.forget(attempt)
            raise
        finally:
            files = {name: image.data for name, image in images.items()}
            self._recorder.close(captured.records(self._engine.model), files)

    def _context(
        self, attempt: AttemptScope, scope: AsgiScope, body: JsonObject, overridden: JsonObject
    ) -> CaptureContext:
        """Return the context in which the engine samples for a request.

        Raises:
            RequestError: the request asks for something that cannot be recorded.
        """
        if body.get(PROMPT_FIELD) is not None:
            raise RequestError(
                f"{PROMPT_FIELD}: chat takes no prompts in tokens; send messages, or use /v1/completions"
            )
        if body.get("echo"):
            raise RequestError(
                "echo: unsampled tokens cannot be recorded; prepend the prompt to the answer yourself"
            )
        if body.get("use_beam_search"):
            raise RequestError(
                "use_beam_search: beams are not sampled, so that they cannot be recorded; sample instead"
            )
        native = ChatDialect if scope["path"] == ChatDialect.path else CompletionsDialect
        digest = _digest(body) + (REPEATED if REPEATED_KEY in scope else "")
        keys = new_keys(attempt, count_choices(body, native is ChatDialect), digest)
        return CaptureContext(
            attempt,
            scope.get(DIALECT_KEY) or native.name,
            body,
            self._clock(),
            keys,
            overridden=overridden,
            requested_model=scope.get(REQUESTED_MODEL_KEY),
        )

    async def _prompt(
        self,
        context: CaptureContext,
        sent: SentConversation | None,
        headers: dict[bytes, bytes],
        images: Images,
    ) -> list[int] | None:
        """Return the prompt of a continued conversation in tokens; None has the engine render messages.

        The source of the prompt is recorded in `context.prompt`, and the relation of the request to earlier
        ones in `context.history`.

        Raises:
            RequestError: the value of the header that switches this is neither on nor off.
        """
        switch = headers.get(TOKEN_IN, b"on").lower()
        if switch not in (b"on", b"off"):
            value = switch.decode("latin-1")[:80]
            raise RequestError(f"{TOKEN_IN.decode()} must be on or off, not {value!r}")
        if self._conversations is None or sent is None:
            return None
        if switch == b"off":
            context.history = HistoryNote("token_in_off", DRIFTS["token_in_off"])
            return None
        if self._loader is not None:
            missing = self._conversations.unknown_answer(sent)
            if missing:
                await self._loader.load(context.scope, missing)
        if images:
            await self._conversations.prepare(images)
        prompt = self._conversations.prompt(sent, images)
        context.prompt, context.history = prompt.source, prompt.note
        return prompt.tokens


def count_choices(body: JsonObject, chat: bool) -> int:
    """Return the number of choices that a request asks for, over all its prompts.

    Raises:
        RequestError: `n` is not a number of choices, or is more than `MAX_CHOICES`.
    """
    n, prompt = body.get("n"), body.get("prompt")
    if n is not None and (
        type(n) is not int or n < 1
    ):  # engines accept "3" too, and would sample unannounced calls
        raise RequestError(f"n: it must be a whole number from 1 on, not {n!r:.50}")
    count = n or 1
    if not chat and isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        count *= len(prompt)
    if count > MAX_CHOICES:
        raise RequestError(f"n: a request may have at most {MAX_CHOICES} choices, not {count}")
    return count


def _digest(body: Mapping[str, object]) -> str:
    """Return a hash by which equal requests are recognized, streamed or not."""
    fields = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    return hashlib.blake2b(msgspec.json.encode(fields, order="deterministic"), digest_size=16).hexdigest()


REMOVED = (*NEUTRAL, "seed")
"""Parameters that are removed. A seed would give all rollouts of a group the same random numbers."""


def override(fields: JsonObject, temperature: float) -> tuple[JsonObject, JsonObject]:
    """Return a request's fields with the training sampling, and the requested values that were replaced.

    The temperature is replaced, and `top_p`, `top_k`, `min_p`, penalties, biases that ban nothing and the
    seed are removed. Limits of length, stop words, schemas and tools stay as requested.
    """
    replaced = {name: fields[name] for name in REMOVED if fields.get(name) is not None}
    replaced = {name: value for name, value in replaced.items() if value not in NEUTRAL.get(name, ())}
    if fields.get("temperature", 1.0) not in (None, temperature):
        replaced["temperature"] = fields.get("temperature", 1.0)
    kept = {name: value for name, value in fields.items() if name not in REMOVED}
    if "logit_bias" in off_policy_parameters({"logit_bias": _bias(fields)}):
        replaced["logit_bias"] = kept.pop("logit_bias")
    return kept | {"temperature": temperature}, replaced


def _bias(fields: JsonObject) -> JsonObject | None:
    """Return the request's bias if it is well-formed; engines reject others."""
    bias = fields.get("logit_bias")
    well_formed = isinstance(bias, dict) and all(isinstance(value, int | float) for value in bias.values())
    return bias if well_formed else None
