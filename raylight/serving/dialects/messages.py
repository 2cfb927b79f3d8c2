"""Anthropic's messages dialect: requests as chat requests, and chat answers as its messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from raylight.engines.capture_context import AttemptScope
from raylight.http.errors import CONTEXT_LENGTH, KINDS, RequestError, anthropic_message
from raylight.semconv import MESSAGES_SPAN
from raylight.serving.dialects.answers import Block, BlockReader, Step, Turn, read_turn
from raylight.serving.dialects.dialect import TOKENIZE, AnswerStream, Dialect, Event, Translation
from raylight.serving.dialects.messages_request import (
    CountTokensRequest,
    MessagesRequest,
    provider_tools,
    sign,
)
from raylight.types import JsonObject
from raylight.types.chat_messages import INVALID_JSON
from raylight.types.json_object import parse_json

COUNT_TOKENS = "/v1/messages/count_tokens"
STOP_REASONS = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}
"""Stop reasons by the engine's finish reason."""
DELTAS = {
    "text": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
    "call": ("input_json_delta", "partial_json"),
}
"""Type of a delta, and its field with the text, by the kind of its block."""
NO_THREADS = {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
"""Details of the error after which Anthropic's SDK sends the whole conversation, without `thread`."""


class MessagesDialect(Dialect):
    """Anthropic's messages, and the count of a prompt's tokens."""

    name = "messages"
    path = "/v1/messages"
    other_paths: ClassVar[Mapping[str, str]] = {COUNT_TOKENS: "count_tokens"}
    span_name = MESSAGES_SPAN
    id_prefix = "msg_"
    error_statuses: ClassVar[Mapping[int, int]] = {503: 529}

    def translate(self, path: str, body: JsonObject, scope: AttemptScope | None) -> Translation:
        if body.get("thread") is not None:
            raise RequestError(
                "thread: this endpoint holds no conversations; send all messages of the conversation in each "
                "request, without thread",
                details=NO_THREADS,
            )
        if path == COUNT_TOKENS:
            count = CountTokensRequest.read(body)
            return TokenCount(count.to_chat(), count.field_names())
        request = MessagesRequest.read(body)
        translation = MessagesTranslation(request.to_chat(), request.field_names())
        translation.dropped_tools = provider_tools(request.tools)
        return translation

    @classmethod
    def error_body(cls, error: RequestError) -> JsonObject:
        default = "invalid_request_error" if error.status < 500 else "api_error"
        too_long = error.code == CONTEXT_LENGTH
        message = anthropic_message(error.message) if too_long else error.message
        details = {"details": error.details} if error.details else {}
        return {
            "type": "error",
            "error": {"type": KINDS.get(error.status, default), "message": message} | details,
            "request_id": None,
        }


class MessagesTranslation(Translation):
    """A request to `/v1/messages`."""

    def write_answer(self, answer: JsonObject) -> JsonObject:
        turn = read_turn(answer)
        content = [_content_block(block, _input(block.text)) for block in turn.blocks]
        return _message(turn) | {"content": content, "usage": _usage(turn)} | _stop(turn)

    def start_stream(self) -> MessagesStream:
        return MessagesStream()


class TokenCount(Translation):
    """A request to `/v1/messages/count_tokens`."""

    engine_path = TOKENIZE

    def write_answer(self, answer: JsonObject) -> JsonObject:
        if not isinstance(answer.get("count"), int):
            raise RequestError("the engine's answer has no count of tokens", 502)
        return {"input_tokens": answer["count"]}

    def start_stream(self) -> MessagesStream:
        raise RequestError("the engine streams a count of tokens, which is one JSON object", 502)


class MessagesStream(AnswerStream):
    """Writer of a streamed message."""

    def __init__(self) -> None:
        self._reader = BlockReader()
        self._started = False

    def feed(self, chunk: JsonObject) -> list[Event]:
        steps = self._reader.feed(chunk)
        start = [] if self._started else [self._start()]
        self._started = True
        return start + [event for step in steps for event in _events(step)]

    def finish(self) -> list[Event]:
        turn = self._reader.turn
        stop = _stop(turn)
        events = [event for step in self._reader.finish() for event in _events(step)]
        end = {"type": "message_delta", "delta": stop, "usage": _usage(turn)}
        return [*events, end, {"type": "message_stop"}]

    def keep_alive(self) -> list[Event]:
        return [{"type": "ping"}]

    def _start(self) -> Event:
        turn = self._reader.turn
        empty: JsonObject = {"content": [], "stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": _message(turn) | empty | {"usage": _usage(turn)}}


def _events(step: Step) -> list[Event]:
    index = step.block.index
    if step.kind == "start":
        empty = _content_block(Block(**vars(step.block) | {"text": ""}), {})
        return [{"type": "content_block_start", "index": index, "content_block": empty}]
    if step.kind == "stop":
        return [*_signature_delta(step.block), {"type": "content_block_stop", "index": index}]
    kind, field = DELTAS[step.block.kind]
    return [{"type": "content_block_delta", "index": index, "delta": {"type": kind, field: step.text}}]


def _signature_delta(block: Block) -> list[Event]:
    if block.kind != "reasoning":
        return []
    delta = {"type": "signature_delta", "signature": sign(block.text)}
    return [{"type": "content_block_delta", "index": block.index, "delta": delta}]


def _message(turn: Turn) -> JsonObject:
    """Return the fields of a message that do not depend on its content."""
    return {"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "model": turn.model}


def _content_block(block: Block, arguments: JsonObject) -> JsonObject:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {
            "type": "thinking",
            "thinking": block.text,
            "signature": sign(block.text) if block.text else "",
        }
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _input(arguments: str) -> JsonObject:
    """Decode the arguments of a call.

    Text that is not a JSON object is kept verbatim, so that the next turn can quote it.
    """
    decoded = parse_json(arguments or "{}")
    return decoded if isinstance(decoded, dict) else {INVALID_JSON: arguments}


def _usage(turn: Turn) -> JsonObject:
    """Return counts of tokens. As in Anthropic's API, tokens from the prefix cache count separately."""
    cached = turn.cached_tokens
    return {
        "input_tokens": max(0, turn.prompt_tokens - cached),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": turn.completion_tokens,
        "output_tokens_details": {"thinking_tokens": turn.reasoning_tokens},
    }


def _stop(turn: Turn) -> JsonObject:
    """Return the stop reason of a complete turn.

    Raises:
        RequestError: 503, the turn is incomplete.
    """
    reason = STOP_REASONS.get(turn.finish_reason or "")
    if reason is None:
        raise turn.incomplete_error()
    if reason == "end_turn" and any(block.kind == "call" for block in turn.blocks):
        reason = "tool_use"
    if reason == "end_turn" and turn.stop_word is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": turn.stop_word}
    return {"stop_reason": reason, "stop_sequence": None}
