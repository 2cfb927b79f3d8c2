"""The layer around the engine's application that records what it samples for an attempt, token for token.

Laws: the store knows of a call before the first byte of its answer leaves; a conversation is remembered before the last one does,
so that the next request finds it; nobody samples for a client that is gone, or for an attempt that is over; every call that was
announced is closed, whatever happens, with all that was sampled for it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from raylight.engines.capture_context import SCOPE, AttemptScope, CaptureContext, new_keys
from raylight.engines.protocol import PROMPT_IDS, Engine
from raylight.http.errors import RequestError, error_response
from raylight.http.request import JsonRequest, json_request
from raylight.serving.capture.captured_request import CapturedRequest
from raylight.serving.capture.conversation_loader import ConversationLoader, History
from raylight.serving.capture.finished_attempts import FinishedAttempts
from raylight.serving.capture.recorder import AttemptOver, Overloaded, Recorder
from raylight.serving.conversations.conversations import Conversations
from raylight.serving.dialects.translate import DIALECT_KEY

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_CHOICES = 1024
"""Choices of one request."""
PROMPT = "kv_transfer_params"
"""The field of a chat request in which engines take a prompt in tokens. No agent may send it."""
TOKEN_IN = b"x-raylight-token-in"
"""A request with this header and the value `off` has its prompt rendered from its messages alone."""
REQUEST_ID = b"x-request-id"
"""Engines make the answer's id of it, so that it names the call."""


class CaptureMiddleware:
    """Records the chats and completions of attempts; everything else passes through.

    Args:
        app: the engine's.
        conversations: None has every prompt rendered from its messages.
        history: brings back the conversations of an attempt that another replica served until now.
        clock: seconds since the epoch.
        over: the attempts that are over, shared with the gateway.
    """

    def __init__(
        self,
        app: ASGIApp,
        engine: Engine,
        recorder: Recorder,
        conversations: Conversations | None,
        history: History | None = None,
        clock: Callable[[], float] = time.time,
        over: FinishedAttempts | None = None,
    ) -> None:
        self._app = app
        self._engine = engine
        self._recorder = recorder
        self._conversations = conversations
        self._recall = (
            ConversationLoader(conversations, history)
            if conversations is not None and history is not None
            else None
        )
        self._clock = clock
        self._over = over or FinishedAttempts()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        inside = SCOPE.get()
        if (
            inside is None
            or scope["type"] != "http"
            or scope["path"] not in (CHAT, COMPLETIONS)
            or scope["method"] != "POST"
        ):
            await self._app(scope, receive, send)
            return
        try:
            request = await json_request(scope, receive)
            await self._record(inside, request, scope, receive, send)
        except RequestError as error:
            refusal = error_response(error)  # outer layers put it into the dialect's own shape
            if isinstance(error, Overloaded):
                refusal.headers["retry-after"] = str(error.retry_after)
            await refusal(scope, receive, send)

    async def _record(
        self, inside: AttemptScope, request: JsonRequest, scope: AsgiScope, receive: Receive, send: Send
    ) -> None:
        """Announce the calls of a request, have it answered, and close them.

        Raises:
            RequestError: it was refused, and nothing has been sent yet.
        """
        if inside in self._over:
            raise AttemptOver
        headers = dict(scope["headers"])
        exchange = self._exchange(inside, scope, request.fields)
        known = await self._recorder.open(exchange.keys, exchange.start_time)
        passage = CapturedRequest(exchange, known, send, self._clock, self._conversations)
        try:
            if scope["path"] == CHAT and (tokens := await self._prompt(exchange, headers)) is not None:
                request = JsonRequest({**exchange.body, PROMPT: {PROMPT_IDS: tokens}}, receive)
            kept = [pair for pair in scope["headers"] if pair[0] != REQUEST_ID]
            named = {**scope, "headers": [*kept, (REQUEST_ID, exchange.keys[0].call_id.encode())]}
            await passage.run(self._app, named, request, receive)
        except AttemptOver:
            self._over.add(inside)
            if self._conversations is not None:
                self._conversations.forget(inside)
            raise
        finally:
            self._recorder.close(passage.records(self._engine.model))

    def _exchange(self, inside: AttemptScope, scope: AsgiScope, body: dict[str, Any]) -> CaptureContext:
        """What a request asks for.

        Raises:
            RequestError: it asks for something that cannot be recorded.
        """
        if body.get(PROMPT) is not None:
            raise RequestError(
                f"{PROMPT}: prompts in tokens are made here; send messages, or use /v1/completions"
            )
        if body.get("echo"):
            raise RequestError(
                "echo: tokens that were not sampled cannot be recorded; put the prompt before the answer yourself"
            )
        if body.get("use_beam_search"):
            raise RequestError(
                "use_beam_search: beams are not sampled, and cannot be recorded token for token"
            )
        chat = scope["path"] == CHAT
        keys = new_keys(inside, count_choices(body, chat), _digest(body))
        return CaptureContext(
            inside, scope.get(DIALECT_KEY) or ("chat" if chat else "completions"), body, self._clock(), keys
        )

    async def _prompt(self, exchange: CaptureContext, headers: dict[bytes, bytes]) -> list[int] | None:
        """The prompt in tokens, where the request continues a conversation, as `exchange.prompt` then says; None: the engine is to
        render it.

        Raises:
            RequestError: the header that switches this has a value that says nothing.
        """
        wish = headers.get(TOKEN_IN, b"on").lower()
        if wish not in (b"on", b"off"):
            raise RequestError(f"{TOKEN_IN.decode()} is on or off, not {wish.decode('latin-1')[:80]!r}")
        if self._conversations is None or wish == b"off":
            return None
        if self._recall is not None and (
            missing := self._conversations.unknown_answer(exchange.scope, exchange.body)
        ):
            await self._recall.load(exchange.scope, missing)
        splice = self._conversations.splice(exchange.scope, exchange.body)
        if splice is None:
            return None
        exchange.prompt = "spliced" if splice.complete else "partly"
        return splice.tokens


def count_choices(body: dict[str, Any], chat: bool) -> int:
    """How many choices a request asks for.

    Raises:
        RequestError: no number of choices, or more than anybody may have.
    """
    n, prompt = body.get("n"), body.get("prompt")
    if n is not None and (
        type(n) is not int or n < 1
    ):  # engines would take "3", and sample what nobody announced
        raise RequestError(f"n: a whole number of choices from 1 on, not {n!r:.50}")
    count = n or 1
    if not chat and isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list):
        count *= len(prompt)
    if count > MAX_CHOICES:
        raise RequestError(f"a request has at most {MAX_CHOICES} choices; this one asks for {count}")
    return count


def _digest(body: Mapping[str, Any]) -> str:
    """Tells whether the same was asked again, streamed or not."""
    asked = {name: value for name, value in body.items() if name not in ("stream", "stream_options")}
    return hashlib.blake2b(json.dumps(asked, sort_keys=True).encode(), digest_size=16).hexdigest()
