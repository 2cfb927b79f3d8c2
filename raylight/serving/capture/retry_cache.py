"""Middleware that answers an SDK's retry of a request with the answer that was already sampled.

Laws: an answer is replayed only to a retry (the SDK marks it), of the same attempt, on the same path, with
the same body. Each retry continues the request before it. Errors and broken answers are not replayed: their
retries are answered afresh. A retry of a request that is unknown here is marked: another replica had it, or
none. The kept answers are bounded in number, bytes and age.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from raylight._utils.aio import BroadcastCondition
from raylight.engines.capture_context import SCOPE, AttemptScope
from raylight.http.request import JsonRequest, json_request, until_disconnect
from raylight.serving.dialects.registry import sampling_dialect

RETRY_COUNT = b"x-stainless-retry-count"
"""Header with the number of times that a request was sent before, set by the SDKs of OpenAI and Anthropic."""
REPEATED_KEY = "raylight.repeated"
"""Key of the ASGI scope of a retry whose earlier request went to another replica; its value is True."""
TTL_S = 300.0
"""Age at which an answer is dropped."""
DELIVERED_TTL_S = 30.0
"""Age up to which an answer that seems delivered is replayed; a client that lost it has noticed by then."""
PER_ATTEMPT = 256
"""Answers kept of one attempt."""
MAX_BYTES = 64 * 2**20
"""Bytes kept of all answers."""
OVERHEAD = 512
"""Bytes that a message takes besides its body and its headers."""
HEADER_OVERHEAD = 128
"""Bytes that a header takes besides its text."""
ANSWER_OVERHEAD = 2_048
"""Bytes that an answer takes besides its messages."""

Key: TypeAlias = tuple[AttemptScope, str, bytes, bytes]
"""Identity of a request: attempt and agent, path, query, and a hash of the body."""


@dataclass(eq=False, slots=True)
class _KeptAnswer:
    """An answer that is being sent, or has ended."""

    key: Key
    tries: int
    """Retry count of the latest request that receives it."""
    is_repetition: bool = False
    """True if another replica had the request before."""
    messages: list[Message] = field(default_factory=list)
    size: int = ANSWER_OVERHEAD
    """Bytes, overhead included."""
    followers: int = 0
    """Retries that receive it at the moment."""
    state: Literal["running", "complete", "failed"] = "running"
    """"failed": an error or broken; the next retry is answered afresh."""
    delivered: bool = False
    """True if this end of the connection saw all of it leave."""
    ended: float = 0.0
    """Time of its end."""
    changed: BroadcastCondition = field(default_factory=BroadcastCondition)

    @property
    def attempt(self) -> tuple[str, str]:
        return self.key[0].rollout_id, self.key[0].attempt_id


class RetryCache:
    """ASGI middleware that replays answers. Requests outside attempts pass through.

    Args:
        clock: monotonic time in seconds.
        on_replay: called after each request that was answered with a kept answer.
    """

    def __init__(
        self,
        app: ASGIApp,
        clock: Callable[[], float] = time.monotonic,
        ttl_s: float = TTL_S,
        per_attempt: int = PER_ATTEMPT,
        max_bytes: int = MAX_BYTES,
        on_replay: Callable[[], None] = lambda: None,
    ) -> None:
        self._app = app
        self._clock = clock
        self._ttl_s = ttl_s
        self._delivered_ttl_s = min(DELIVERED_TTL_S, ttl_s)
        self._per_attempt = per_attempt
        self._max_bytes = max_bytes
        self._on_replay = on_replay
        self._answers: dict[Key, list[_KeptAnswer]] = {}
        self._ended: OrderedDict[_KeptAnswer, None] = OrderedDict()
        """Ended answers, the oldest first."""
        self._ended_bytes = 0
        self._ended_of_attempt: Counter[tuple[str, str]] = Counter()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        attempt = SCOPE.get()
        if (
            attempt is None
            or scope["type"] != "http"
            or scope["method"] != "POST"
            or sampling_dialect(scope["path"]) is None
        ):
            await self._app(scope, receive, send)
            return
        request = await json_request(scope, receive)
        digest = hashlib.blake2b(request.content, digest_size=16).digest()
        key = (attempt, scope["path"], scope.get("query_string", b""), digest)
        tries = _retry_count(scope)
        self._drop_old()
        previous = self._find_previous(key, tries) if tries else None
        if previous is not None:
            if previous.state != "failed" and await self._replay(previous, tries, receive, send):
                self._on_replay()
                return
            self.drop(previous)
        is_repetition = tries > 0 and (previous is None or previous.is_repetition)
        if is_repetition:
            scope = {**scope, REPEATED_KEY: True}
        await self._answer(_KeptAnswer(key, tries, is_repetition), scope, request, receive, send)

    # replaying

    def _find_previous(self, key: Key, tries: int) -> _KeptAnswer | None:
        """Return the answer to the request that a retry repeats.

        An agent may send equal requests, so that several answers qualify. A failed one comes first, because a
        retry must follow it; then one that is known to be lost; then one that is still running; then one that
        seems delivered just now.
        """
        delivered_since = self._clock() - self._delivered_ttl_s
        candidates = [
            answer
            for answer in self._answers.get(key, ())
            if answer.tries < tries and not (answer.delivered and answer.ended < delivered_since)
        ]
        return max(candidates, key=_likelihood, default=None)

    async def _replay(self, answer: _KeptAnswer, tries: int, receive: Receive, send: Send) -> bool:
        """Send an answer, which may still be running; False if it broke before any of it was sent."""
        answer.tries, answer.delivered, sent = tries, False, 0
        answer.followers += 1
        disconnect = asyncio.ensure_future(until_disconnect(receive))
        disconnect.add_done_callback(lambda _: answer.changed.notify_all())

        def has_news(seen: int) -> bool:
            return len(answer.messages) > seen or answer.state != "running" or disconnect.done()

        try:
            while True:
                await answer.changed.wait_for(partial(has_news, sent))
                if disconnect.done():
                    return True
                if answer.state == "failed":
                    break
                for message in answer.messages[sent:]:
                    sent += 1
                    await send(message)
                if answer.state == "complete" and sent == len(answer.messages):
                    answer.delivered = True
                    return True
        finally:
            disconnect.cancel()
            answer.followers -= 1
            answer.changed.notify_all()
        if sent:
            raise ConnectionError("the replayed answer broke off")
        return False

    # keeping

    async def _answer(
        self, answer: _KeptAnswer, scope: AsgiScope, request: JsonRequest, receive: Receive, send: Send
    ) -> None:
        connection = _KeepingConnection(self, answer, receive, send)
        inner = request.with_receive(connection.receive)
        self._answers.setdefault(answer.key, []).append(answer)
        try:
            await self._app(inner.put_into(scope), inner, connection.send)
        finally:
            if answer.state == "running":
                self.end(answer, "failed")

    def add_message(self, answer: _KeptAnswer, message: Message, last: bool) -> None:
        answer.messages.append(message)
        answer.size += len(message.get("body", b"")) + OVERHEAD
        if headers := message.get("headers"):
            answer.size += sum(len(name) + len(value) + HEADER_OVERHEAD for name, value in headers)
        if message.get("status", 200) >= 400 or answer.size > self._max_bytes:
            self.end(answer, "failed")
        elif last:
            self.end(answer, "complete")
        else:
            answer.changed.notify_all()

    def end(self, answer: _KeptAnswer, state: Literal["complete", "failed"]) -> None:
        """Keep an ended answer; the oldest ones are dropped to make room for it."""
        if state == "failed":
            answer.messages, answer.size = [], ANSWER_OVERHEAD
        answer.state, answer.ended = state, self._clock()
        self._ended[answer] = None
        self._ended_bytes += answer.size
        self._ended_of_attempt[answer.attempt] += 1
        answer.changed.notify_all()
        self._drop_old()
        if self._ended_of_attempt[answer.attempt] > self._per_attempt:
            self.drop(next(old for old in self._ended if old.attempt == answer.attempt))

    def _drop_old(self) -> None:
        """Drop answers for their age, and the oldest ones for room."""
        since = self._clock() - self._ttl_s
        while self._ended:
            oldest = next(iter(self._ended))
            if oldest.ended > since and self._ended_bytes <= self._max_bytes:
                return
            self.drop(oldest)

    def drop(self, answer: _KeptAnswer) -> None:
        """Stop keeping an ended answer. Requests that already receive it get all of it."""
        if answer not in self._ended:
            return
        del self._ended[answer]
        self._ended_bytes -= answer.size
        self._ended_of_attempt[answer.attempt] -= 1
        if not self._ended_of_attempt[answer.attempt]:
            del self._ended_of_attempt[answer.attempt]
        equals = self._answers[answer.key]
        equals.remove(answer)
        if not equals:
            del self._answers[answer.key]


class _KeepingConnection:
    """The connection of a request whose answer is kept."""

    def __init__(self, cache: RetryCache, answer: _KeptAnswer, receive: Receive, send: Send) -> None:
        self._cache = cache
        self._answer = answer
        self._from_client = receive
        self._to_client = send
        self._disconnected = False

    async def receive(self) -> Message:
        """Receive from the client. Its disconnect is withheld while a retry waits for the same answer."""
        if not self._disconnected:
            message = await self._from_client()
            if message["type"] != "http.disconnect":
                return message
            self._disconnected = True
        answer = self._answer
        await answer.changed.wait_for(lambda: not answer.followers or answer.state != "running")
        if answer.state == "running":
            self._cache.end(answer, "failed")  # the application stops it when it receives the disconnect
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        answer = self._answer
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if answer.state == "running":
            self._cache.add_message(answer, message, last)
        if self._disconnected and answer.followers:
            return
        try:
            await self._to_client(message)
        except (
            OSError
        ):  # the client has disconnected, as `receive` will report; a retry may still get the whole answer
            self._disconnected = True
        else:
            answer.delivered = answer.delivered or (last and not self._disconnected)


def _likelihood(answer: _KeptAnswer) -> tuple[bool, bool, bool, int, float]:
    return (
        answer.state == "failed",
        not answer.delivered,
        answer.state == "complete",
        answer.tries,
        answer.ended,
    )


def _retry_count(scope: AsgiScope) -> int:
    """Return the number of times that a request was sent before, according to its client."""
    value = dict(scope["headers"]).get(RETRY_COUNT, b"0")
    return int(value) if value.isdigit() and len(value) < 4 else 0
