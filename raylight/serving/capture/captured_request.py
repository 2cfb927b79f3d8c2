"""One captured request on its way through the engine's application."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope

from raylight._utils.aio import cancel_all
from raylight.engines.capture_context import CURRENT, OVERRIDDEN, CaptureContext, Sample
from raylight.http.request import JsonRequest, until_disconnect
from raylight.http.sse import is_event_stream
from raylight.semconv import (
    AGENT_NAME,
    CALL_ID,
    DIALECT,
    FINISH_REASONS,
    INPUT_MESSAGES,
    OUTPUT_MESSAGES,
    PROMPT_SOURCE,
    REQUEST_MODEL,
    REQUEST_PARAMETERS,
    RESPONSE_ID,
    TIME_TO_FIRST_TOKEN,
    TOOL_DEFINITIONS,
)
from raylight.serving.capture.recorder import ClosedCall
from raylight.serving.conversations.conversations import Conversations, SentConversation
from raylight.serving.dialects.answers import Answer, AnswerReader, Choice
from raylight.serving.dialects.registry import DIALECTS
from raylight.serving.dialects.translate import ANSWER_ID
from raylight.store.payloads import json_text
from raylight.types import AUXILIARY, Attributes, CallKey, Generation, JsonObject, Span, TokenSets
from raylight.types.spans import TraceStatus

logger = logging.getLogger(__name__)

DISCONNECT_TIMEOUT_S = 2.0
"""Time for an application that has received the disconnect to stop by itself."""
WATCH_AFTER_S = 0.05
"""Time after which a request that is still being answered is watched for its client's disconnect."""
START_AFTER_S = 1.0
"""Time after which the start of a stream is sent without its first event, so that it can be kept alive."""
OWN_ATTRIBUTES = frozenset({"messages", "prompt", "tools"})
"""Fields of a request that have a dedicated attribute; the others share `REQUEST_PARAMETERS`."""

SAMPLED = ("output_ids", "logprobs", "weight_versions", "policy_logprobs", "allowed", "routed_experts")
"""Lists of a sample, which become arrays of the generation."""
_OK = TraceStatus(status_code="OK")


class CapturedRequest:
    """A request between the client and the engine's application: its answer is held back, read and passed on.

    Args:
        context: the request and its samples.
        known: done once the store has the request's calls.
        send: the client's.
        clock: seconds since the epoch.
        conversations: remember the answer; None: nothing does.
        sent: the request's messages; None if it is not a chat.
        is_translated: True if an outer layer writes the answer in another dialect.
    """

    def __init__(
        self,
        context: CaptureContext,
        known: asyncio.Future[None],
        send: Send,
        clock: Callable[[], float],
        conversations: Conversations | None,
        sent: SentConversation | None,
        is_translated: bool = False,
    ) -> None:
        self._context = context
        self._known = known
        self._to_client = send
        self._clock = clock
        self._conversations = conversations
        self._sent = sent
        self._is_translated = is_translated
        self._listeners = 0
        self._disconnected = asyncio.Event()
        """Set once the application is to receive a disconnect."""
        self._start: Message | None = None
        self._start_timer: asyncio.TimerHandle | None = None
        self._late_start: asyncio.Future[None] | None = None
        self._status = 0
        self._streams = False
        self._reader: AnswerReader | None = None
        self._first_piece_time: float | None = None
        self._end_time: float | None = None
        self._answer: Answer | None = None
        self._started = self._ended = self._crashed = False

    async def run(self, app: ASGIApp, scope: AsgiScope, request: JsonRequest, receive: Receive) -> None:
        """Have the application answer.

        It is stopped when the client disconnects, or when the call cannot be recorded.

        Raises:
            RequestError: the call cannot be recorded; nothing was sent.
        """
        if self._known.done():
            self._known.result()
        inner = request.with_receive(self._receive)
        loop = asyncio.get_running_loop()
        finished: asyncio.Future[None] = loop.create_future()
        token = CURRENT.set(self._context)
        work = asyncio.ensure_future(app(inner.put_into(scope), inner, self._send))
        CURRENT.reset(token)
        disconnect: asyncio.Future[None] | None = None

        def watch() -> None:
            nonlocal disconnect
            disconnect = asyncio.ensure_future(until_disconnect(receive))
            disconnect.add_done_callback(check)

        def check(_: asyncio.Future[None]) -> None:
            disconnected = disconnect is not None and disconnect.done()
            if disconnected and self._ended:
                self._disconnected.set()  # the answer is sent; the application may go on with other work
            unwanted = (disconnected and not self._ended) or (
                self._known.done() and self._known.exception() is not None
            )
            if (work.done() or unwanted) and not finished.done():
                finished.set_result(None)

        work.add_done_callback(check)
        if not self._known.done():
            self._known.add_done_callback(check)
        timer = loop.call_later(WATCH_AFTER_S, watch)
        try:
            await finished
        finally:
            timer.cancel()
            if self._start_timer is not None:
                self._start_timer.cancel()
            if not work.done():
                await self._stop(work)
            self._start = None  # from now on nothing is started
            if self._late_start is not None:
                await cancel_all([self._late_start])
            if disconnect is not None:
                disconnect.cancel()
        if self._known.done():
            self._known.result()
        self._raise_failure(work)

    def _raise_failure(self, work: asyncio.Future[None]) -> None:
        """Raise the application's exception, unless it comes from being stopped or has been answered."""
        if work.cancelled() or (error := work.exception()) is None:
            return
        if self._status >= 500:  # Starlette's applications answer with 500 and raise the error again
            logger.error("the engine's application failed", exc_info=error)
            return
        if self._disconnected.is_set():
            logger.debug("the application raised after its client had disconnected: %r", error)
            return
        self._crashed = True
        raise error

    async def _stop(self, work: asyncio.Future[None]) -> None:
        """Stop the application: by a disconnect if it listens, so that it cleans up; else by cancellation."""
        self._disconnected.set()
        if self._listeners:
            await asyncio.wait([work], timeout=DISCONNECT_TIMEOUT_S)
        if not work.done():
            work.cancel()
            await asyncio.wait([work])

    # the application's side

    async def _receive(self) -> Message:
        self._listeners += 1
        try:
            await self._disconnected.wait()
        finally:
            self._listeners -= 1
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._hold_start(message)
            return
        if not self._known.done():
            await asyncio.wait([self._known])
        if (self._disconnected.is_set() and not self._ended) or self._known.exception() is not None:
            return  # the client has disconnected, or may not have an unrecorded answer
        if message["type"] == "http.response.body":
            self._read(message.get("body", b""), message.get("more_body", False))
        if self._late_start is not None:
            await self._late_start
        elif self._start is not None and not self._started:
            self._started = True
            await self._to_client(self._start)
        await self._to_client(message)

    def _hold_start(self, message: Message) -> None:
        """Hold the start of an answer until its first byte, so that sampling does not wait for the store.

        The start of a stream whose first event is late is sent before it.
        """
        if self._disconnected.is_set() and not self._started:
            return  # ignore responses sent after the client disconnected
        self._start, self._status = message, message["status"]
        self._streams = is_event_stream(message)
        if self._status < 400:
            self._reader = AnswerReader(self._streams)
            if self._streams:
                self._start_timer = asyncio.get_running_loop().call_later(START_AFTER_S, self._start_late)

    def _start_late(self) -> None:
        """Send the start of a stream whose first event is late, once the store has its calls."""
        if self._start is None or self._started or self._disconnected.is_set():
            return
        if not self._known.done():
            self._known.add_done_callback(lambda _: self._start_late())
        elif self._known.exception() is None:
            self._started = True
            start = self._start
            if self._is_translated:
                start = {**start, "headers": [*start.get("headers", ()), (ANSWER_ID, self._call_id.encode())]}
            self._late_start = asyncio.ensure_future(self._to_client(start))

    def _read(self, piece: bytes, more: bool) -> None:
        """Read a piece of the answer before the client gets it."""
        self._ended = self._ended or not more
        if self._reader is None or self._answer is not None:
            return
        if piece and self._first_piece_time is None and self._streams:
            self._first_piece_time = self._clock()
        self._reader.feed(piece)
        if not more or self._reader.done:
            self._ended = True
            self._end_time = self._clock()  # before the client has it, so that its rewards are later
            self._answer = self._reader.finish()
            self._remember(self._answer)

    def _remember(self, answer: Answer) -> None:
        """Have the conversations remember the tokens of the answer's complete choices."""
        if self._conversations is None or self._sent is None:
            return
        context = self._context
        for choice in answer.choices:
            sample = context.samples.get(choice.index)
            if choice.message is not None and sample is not None and sample.finish_reason != "aborted":
                tokens = sample.token_ids
                self._conversations.remember(self._sent, choice.message, tokens, len(sample.prompt_ids))

    # the recorder's side

    @property
    def _call_id(self) -> str:
        """Id of the request's first call."""
        return self._context.keys[0].call_id

    def records(self, default_model: str) -> list[ClosedCall]:
        """Return the records of the request's calls after it has ended.

        Args:
            default_model: the engine's model, for a request that names none.
        """
        context = self._context
        if self._status >= 400 or (self._crashed and not self._started):
            return [(key, None, None) for key in context.keys]
        answer = self._answer or (self._reader.finish() if self._reader else Answer())
        if self._late_start is not None and self._is_translated:
            answer.id = self._call_id  # the id that the client has seen
        model = model_of(context.body, default_model)
        end_time = self._end_time or self._clock()
        delivered = self._answer is not None
        return records_of(context, answer, model, end_time, self._first_piece_time, delivered)


def model_of(body: Mapping[str, object], default: str) -> str:
    """Return the model that a request asks for; engines reject the names that they do not know."""
    return name if isinstance(name := body.get("model"), str) and name else default


def records_of(
    context: CaptureContext,
    answer: Answer,
    model: str,
    end_time: float,
    first_piece_time: float | None,
    delivered: bool,
) -> list[ClosedCall]:
    """Return one record for each call of an answered request.

    A call without a sample has no generation: its model runs elsewhere, or sampling never began.

    Args:
        first_piece_time: time of a streamed answer's first piece, in seconds since the epoch.
        delivered: True if the answer is complete. Otherwise no agent used it, and its samples count as
            aborted.
    """
    choices = {choice.index: choice for choice in answer.choices}
    common = _common_attributes(context, answer, first_piece_time)
    records: list[ClosedCall] = []
    for index, key in enumerate(context.keys):
        sample, choice = context.samples.get(index), choices.get(index)
        if sample is None and choice is None:
            records.append((key, None, None))
            continue
        generation = _generation(context, key, sample, model, end_time, delivered) if sample else None
        reason = generation.finish_reason if generation else choice.finish_reason if choice else None
        # without tokens, the answer's id identifies the only choice
        call_id = {CALL_ID: key.call_id} if generation or index else {}
        span = Span(
            status=_OK,
            name=DIALECTS[context.dialect].span_name,
            attributes=common | call_id | _choice_attributes(choice, reason),
            rollout_id=key.rollout_id,
            attempt_id=key.attempt_id,
            span_id=key.call_id[:16],
            trace_id=key.call_id,
            start_time=context.start_time,
            end_time=end_time,
        )
        records.append((key, generation, span))
    return records


def _generation(
    context: CaptureContext, key: CallKey, sample: Sample, model: str, end_time: float, delivered: bool
) -> Generation:
    notes: JsonObject = {OVERRIDDEN: dict(context.overridden)} if context.overridden else {}
    if context.requested_model is not None:
        notes[AUXILIARY] = context.requested_model
    lists: dict[str, Any] = {name: getattr(sample, name) for name in SAMPLED}
    return Generation(
        key=key,
        model=model,
        prompt_ids=sample.prompt_ids,
        finish_reason=sample.finish_reason if delivered else "aborted",
        start_time=context.start_time,
        end_time=end_time,
        sampling=dict(sample.sampling) | notes,
        agent=context.scope.agent,
        history=context.history,
        candidates=TokenSets.join(sample.candidates),
        images=sample.images,
        **lists,
    )


def _common_attributes(context: CaptureContext, answer: Answer, first_piece_time: float | None) -> Attributes:
    """Return the attributes that the spans of all choices share."""
    body, dialect = context.body, DIALECTS[context.dialect]
    messages = body["messages"] if "messages" in body else [{"role": "user", "content": body.get("prompt")}]
    parameters = {name: value for name, value in body.items() if name not in OWN_ATTRIBUTES}
    attributes: Attributes = {
        REQUEST_MODEL: context.requested_model or str(body.get("model", "")),
        INPUT_MESSAGES: json_text(messages),
        REQUEST_PARAMETERS: json_text(parameters),
        DIALECT: dialect.name,
        PROMPT_SOURCE: context.prompt,
    }
    if tools := body.get("tools"):
        attributes[TOOL_DEFINITIONS] = json_text(tools)
    if answer.id is not None and dialect.id_prefix is not None:
        attributes[RESPONSE_ID] = dialect.id_prefix + answer.id.removeprefix("chatcmpl-")
    elif answer.id is not None:
        attributes[RESPONSE_ID] = answer.id
    if context.scope.agent:
        attributes[AGENT_NAME] = context.scope.agent
    if first_piece_time is not None:
        attributes[TIME_TO_FIRST_TOKEN] = first_piece_time - context.start_time
    return attributes


def _choice_attributes(choice: Choice | None, reason: str | None) -> Attributes:
    message = choice.message if choice and choice.message is not None else None
    if message is None:
        message = {"role": "assistant", "content": choice.text if choice else None}
    attributes: Attributes = {OUTPUT_MESSAGES: json_text([message])}
    return attributes | ({FINISH_REASONS: [reason]} if reason else {})
