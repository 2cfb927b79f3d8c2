"""Answers a request that an SDK sends again, because it lost the answer, with what was sampled already.

Laws: an answer is given again only to a retry (the SDK says which), of the same attempt, to the same address, with the same body;
each try of a request finds what became of the try before it; errors, and what broke off, are not given again but answered anew;
what is kept is bounded in number, bytes and time.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias

from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from raylight.aio import BroadcastCondition
from raylight.engines.capture_context import SCOPE, AttemptScope
from raylight.http.request import JsonRequest, json_request, until_disconnect
from raylight.serving.dialects.registry import sampling_dialect

RETRY_COUNT = b"x-stainless-retry-count"
"""How often the SDK has sent this request before; those of OpenAI and Anthropic say so."""
TTL_S = 300.0
JUST_NOW_S = 30.0
"""An answer that seemed to arrive is not given again later than this; who lost it has noticed by then."""
PER_ATTEMPT = 256
MAX_BYTES = 64 * 2**20
OVERHEAD = 512
"""Bytes that a message takes beside its body."""

Key: TypeAlias = tuple[AttemptScope, str, bytes, bytes]
"""The attempt and its agent, the path, the query, and a hash of the body: requests of the same key ask for the same."""


@dataclass(eq=False, slots=True)
class _Answer:
    """An answer as it is made, or was."""

    key: Key
    tries: int
    """How often its request had been sent before, when it was last given."""
    messages: list[Message] = field(default_factory=list)
    size: int = 0
    followers: int = 0
    state: Literal["running", "complete", "failed"] = "running"
    """Failed: it was an error, or broke off, so that the next try is to be answered anew."""
    delivered: bool = False
    """As far as this end of the connection can tell."""
    ended: float = 0.0
    changed: BroadcastCondition = field(default_factory=BroadcastCondition)


class RetryCache:
    """Gives answers again. Requests outside of attempts pass through.

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
        self._just_now_s = min(JUST_NOW_S, ttl_s)
        self._per_attempt = per_attempt
        self._max_bytes = max_bytes
        self._on_replay = on_replay
        self._bytes = 0
        self._of_attempt: dict[tuple[str, str], int] = {}
        self._answers: dict[Key, list[_Answer]] = {}
        self._ended: OrderedDict[_Answer, None] = OrderedDict()

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        inside = SCOPE.get()
        if (
            inside is None
            or scope["type"] != "http"
            or scope["method"] != "POST"
            or sampling_dialect(scope["path"]) is None
        ):
            await self._app(scope, receive, send)
            return
        request = await json_request(scope, receive)
        key = (
            inside,
            scope["path"],
            scope.get("query_string", b""),
            hashlib.blake2b(request.content, digest_size=16).digest(),
        )
        tries = _tries(scope)
        self._expire()
        if tries and (earlier := self._find(key, tries)) is not None:
            if earlier.state != "failed" and await self._give(earlier, tries, receive, send):
                self._on_replay()
                return
            self.drop(earlier)
        await self._make(_Answer(key, tries), scope, request, receive, send)

    # giving again

    def _find(self, key: Key, tries: int) -> _Answer | None:
        """What became of the try before. Where an agent asks the same several times, several may be in question: first what
        failed, since a retry must follow; then what is known to be lost, what is not over, and what seemed to arrive just now.
        """
        since = self._clock() - self._just_now_s
        candidates = [
            answer
            for answer in self._answers.get(key, ())
            if answer.tries < tries and not (answer.delivered and answer.ended < since)
        ]
        return max(candidates, key=_likelihood, default=None)

    async def _give(self, answer: _Answer, tries: int, receive: Receive, send: Send) -> bool:
        """Send an answer as it is made; False if it broke off before any of it was sent."""
        answer.tries, answer.delivered, sent = tries, False, 0
        answer.followers += 1
        leaving = asyncio.ensure_future(until_disconnect(receive))
        leaving.add_done_callback(lambda _: answer.changed.notify_all())

        def news(seen: int) -> bool:
            return len(answer.messages) > seen or answer.state != "running" or leaving.done()

        try:
            while True:
                await answer.changed.wait_for(partial(news, sent))
                if leaving.done():
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
            leaving.cancel()
            answer.followers -= 1
            answer.changed.notify_all()
        if sent:
            raise ConnectionError("the answer that was given again broke off")
        return False

    # making

    async def _make(
        self, answer: _Answer, scope: AsgiScope, request: JsonRequest, receive: Receive, send: Send
    ) -> None:
        """Have a request answered, and keep the answer."""
        making = _Making(self, answer, receive, send)
        inner = request.with_receive(making.receive)
        self._answers.setdefault(answer.key, []).append(answer)
        try:
            await self._app(inner.put_into(scope), inner, making.send)
        finally:
            if answer.state == "running":
                self.keep(answer, "failed")

    def note(self, answer: _Answer, message: Message, last: bool) -> None:
        """A running answer goes on."""
        answer.messages.append(message)
        answer.size += len(message.get("body", b"")) + OVERHEAD
        if message.get("status", 200) >= 400 or answer.size > self._max_bytes:
            self.keep(answer, "failed")
        elif last:
            self.keep(answer, "complete")
        else:
            answer.changed.notify_all()

    def keep(self, answer: _Answer, state: Literal["complete", "failed"]) -> None:
        """An answer is over. Those that ended first make room for it."""
        attempt = _attempt(answer)
        if state == "failed":
            answer.messages, answer.size = [], OVERHEAD
        answer.state, answer.ended = state, self._clock()
        self._ended[answer] = None
        self._bytes += answer.size
        self._of_attempt[attempt] = self._of_attempt.get(attempt, 0) + 1
        answer.changed.notify_all()
        if self._of_attempt[attempt] > self._per_attempt:
            self.drop(next(old for old in self._ended if _attempt(old) == attempt))
        while self._bytes > self._max_bytes:
            self.drop(next(iter(self._ended)))

    def drop(self, answer: _Answer) -> None:
        """Keep an answer that is over no longer; who has begun to get it gets it whole."""
        if answer not in self._ended:
            return
        attempt, found = _attempt(answer), self._answers[answer.key]
        del self._ended[answer]
        self._bytes -= answer.size
        self._of_attempt[attempt] -= 1
        if not self._of_attempt[attempt]:
            del self._of_attempt[attempt]
        found.remove(answer)
        if not found:
            del self._answers[answer.key]

    def _expire(self) -> None:
        now = self._clock()
        while self._ended and (oldest := next(iter(self._ended))).ended + self._ttl_s <= now:
            self.drop(oldest)


class _Making:
    """The connection of the request whose answer is being made."""

    def __init__(self, replay: RetryCache, answer: _Answer, receive: Receive, send: Send) -> None:
        self._replay = replay
        self._answer = answer
        self._from_client = receive
        self._to_client = send
        self._left = False

    async def receive(self) -> Message:
        """Receive from the client; its disconnect is withheld as long as a retry waits for the same answer."""
        if not self._left:
            message = await self._from_client()
            if message["type"] != "http.disconnect":
                return message
            self._left = True
        answer = self._answer
        await answer.changed.wait_for(lambda: not answer.followers or answer.state != "running")
        if answer.state == "running":
            self._replay.keep(answer, "failed")  # it will break off
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        answer = self._answer
        last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if answer.state == "running":
            self._replay.note(answer, message, last)
        if self._left and answer.followers:
            return
        try:
            await self._to_client(message)
        except (
            OSError
        ):  # the client is gone, and `receive` says so too; the answer may be whole for a retry all the same
            self._left = True
        else:
            answer.delivered = answer.delivered or (last and not self._left)


def _likelihood(answer: _Answer) -> tuple[bool, bool, bool, int, float]:
    return (
        answer.state == "failed",
        not answer.delivered,
        answer.state == "complete",
        answer.tries,
        answer.ended,
    )


def _attempt(answer: _Answer) -> tuple[str, str]:
    inside = answer.key[0]
    return inside.rollout_id, inside.attempt_id


def _tries(scope: AsgiScope) -> int:
    """How often a request was sent before, as far as its client says."""
    value = dict(scope["headers"]).get(RETRY_COUNT, b"0")
    return int(value) if value.isdigit() and len(value) < 4 else 0
