"""One exchange on its way through the engine's application: what is held back, watched, and read as it passes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from raylight.engines.capture_context import CURRENT, CaptureContext
from raylight.http.request import JsonRequest, until_disconnect
from raylight.serving.capture.call_records import model_of, records_of
from raylight.serving.capture.recorder import Closed
from raylight.serving.conversations.conversations import Conversations
from raylight.serving.dialects.answers import Answer, AnswerReader

logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""For an application that listens for its client's leaving to end by itself."""
DONE = b"data: [DONE]"
"""The last event of a stream. Clients may go on before the stream's end."""


class CapturedRequest:
    """An exchange between the client and the engine's application.

    Args:
        known: done when the store knows of the exchange's calls.
        send: the client's.
        conversations: are to remember the answer.
    """

    def __init__(
        self,
        exchange: CaptureContext,
        known: asyncio.Future[None],
        send: Send,
        clock: Callable[[], float],
        conversations: Conversations | None,
    ) -> None:
        self._exchange = exchange
        self._known = known
        self._to_client = send
        self._clock = clock
        self._conversations = conversations
        self._listening = 0
        self._hung_up = asyncio.Event()
        self._start: Message | None = None
        self._status = 0
        self._streams = False
        self._reader: AnswerReader | None = None
        self._first_piece: float | None = None
        self._end_time: float | None = None
        self._answer: Answer | None = None
        self._began = self._ended = self._crashed = False

    async def run(self, app: ASGIApp, scope: AsgiScope, request: JsonRequest, receive: Receive) -> None:
        """Have the application answer. It ends early when the client leaves, or when the call cannot be recorded.

        Raises:
            RequestError: the call cannot be recorded; nothing was sent.
        """
        inner = request.with_receive(self._receive)
        if self._known.done():
            self._known.result()
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        token = CURRENT.set(self._exchange)
        work = asyncio.ensure_future(app(inner.put_into(scope), inner, self._send))
        CURRENT.reset(token)
        leaving = asyncio.ensure_future(until_disconnect(receive))

        def look(_: asyncio.Future[None]) -> None:
            if leaving.done() and self._ended:
                self._hung_up.set()  # the client has all of it; what the application does now is its own business
            unwanted = (leaving.done() and not self._ended) or (
                self._known.done() and self._known.exception() is not None
            )
            if (work.done() or unwanted) and not over.done():
                over.set_result(None)

        for event in (work, leaving, self._known):
            event.add_done_callback(look)
        try:
            await over
        finally:
            if not work.done():
                await self._hang_up(work)
            leaving.cancel()
        if self._known.done():
            self._known.result()
        self._judge(work)

    def _judge(self, work: asyncio.Future[None]) -> None:
        """Raise what the application raised, unless it is only that it was told to end."""
        if work.cancelled() or (error := work.exception()) is None:
            return
        if self._status >= 500:
            logger.error(
                "the engine's application failed", exc_info=error
            )  # it has answered so, as Starlette's do
            return
        if self._hung_up.is_set():
            logger.debug("the application raised when its client had left: %r", error)
            return
        self._crashed = True
        raise error

    async def _hang_up(self, work: asyncio.Future[None]) -> None:
        """End the application's work: tell it, if it listens; it knows best what it has begun."""
        self._hung_up.set()
        if self._listening:
            await asyncio.wait([work], timeout=GRACE_S)
        if not work.done():
            work.cancel()
            await asyncio.wait([work])

    # what the application sees

    async def _receive(self) -> Message:
        self._listening += 1
        try:
            await self._hung_up.wait()
        finally:
            self._listening -= 1
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._begin(message)
            return
        if not self._known.done():
            await asyncio.wait([self._known])
        if (self._hung_up.is_set() and not self._ended) or self._known.exception() is not None:
            return  # nobody is there, or nobody may have it
        if message["type"] == "http.response.body":
            self._read(message.get("body", b""), message.get("more_body", False))
        if self._start is not None and not self._began:
            self._began = True
            await self._to_client(self._start)
        await self._to_client(message)

    def _begin(self, message: Message) -> None:
        """The start of an answer is held back until there is a first byte, so that no sampling waits for the store."""
        if self._hung_up.is_set() and not self._began:
            return  # what the application says to nobody is no answer
        self._start, self._status = message, message["status"]
        content_type = next(
            (v for k, v in message.get("headers", []) if k.lower() == b"content-type"), b""
        ).decode("latin-1")
        self._streams = content_type.startswith("text/event-stream")
        if self._status < 400:
            self._reader = AnswerReader(content_type)

    def _read(self, piece: bytes, more: bool) -> None:
        self._ended = self._ended or not more
        if self._reader is None or self._answer is not None:
            return
        if piece and self._first_piece is None and self._streams:
            self._first_piece = self._clock()
        self._reader.feed(piece)
        if not more or (DONE in piece and self._streams and self._all_sampled()):
            self._ended = True
            self._end_time = self._clock()  # before the client has it, so that its rewards come after
            self._answer = self._reader.finish()
            self._remember(self._answer)

    def _all_sampled(self) -> bool:
        return all(sample.finish_reason != "aborted" for sample in self._exchange.samples.values())

    def _remember(self, answer: Answer) -> None:
        if self._conversations is None:
            return
        for choice in answer.choices:
            sample = self._exchange.samples.get(choice.index)
            if choice.message is not None and sample is not None and sample.finish_reason != "aborted":
                tokens = sample.prompt_ids + sample.output_ids
                self._conversations.remember(
                    self._exchange.scope, self._exchange.body, choice.message, tokens
                )

    # what is left of it

    def records(self, model: str) -> list[Closed]:
        """The records of the exchange's calls, when it is over.

        Args:
            model: that the engine serves; for a request that names none.
        """
        if self._status >= 400 or (self._crashed and not self._began):
            return [(key, None, None) for key in self._exchange.keys]
        answer = self._answer or (self._reader.finish() if self._reader else Answer())
        delivered = self._answer is not None
        model = model_of(self._exchange.body, model)
        return records_of(
            self._exchange, answer, model, self._end_time or self._clock(), self._first_piece, delivered
        )
