"""Anthropic's messages dialect: chat answers as its messages, whole or streamed."""

from __future__ import annotations

import json
from typing import Any

from raylight.http.errors import RequestError, error_body
from raylight.serving.dialects.messages import INVALID_JSON, MessagesRequest, Prompt
from raylight.serving.dialects.turns import Block, BlockReader, Step, Turn, read_turn

Event = dict[str, Any]
"""The data of an event, whose name is its `type`."""


class Messages:
    """One request to `/v1/messages` and its answer."""

    path = "/v1/chat/completions"

    def request(self, body: Any) -> dict[str, Any]:
        return MessagesRequest.read(body).to_chat()

    def answer(self, chat: dict[str, Any]) -> dict[str, Any]:
        """A message.

        Raises:
            RequestError: 502, the chat answer is none, or ends in a way for which there is no word.
        """
        turn = read_turn(chat)
        content = [_content_block(block, _input(block.text)) for block in turn.blocks]
        return _message(turn) | {"content": content, "usage": _usage(turn)} | _stop(turn)

    def stream(self) -> MessagesStream:
        return MessagesStream()


class CountTokens:
    """One request to `/v1/messages/count_tokens` and its answer."""

    path = "/tokenize"

    def request(self, body: Any) -> dict[str, Any]:
        return Prompt.read(body).to_chat()

    def answer(self, counted: dict[str, Any]) -> dict[str, Any]:
        if not isinstance(counted.get("count"), int):
            raise RequestError(
                "the engine's answer does not say how many tokens there are", 502, "server_error"
            )
        return {"input_tokens": counted["count"]}

    def stream(self) -> MessagesStream:
        raise RequestError("the engine streams a count of tokens", 502, "server_error")


class MessagesStream:
    """Turns the chunks of a chat answer into events."""

    def __init__(self) -> None:
        self._reader = BlockReader()
        self._started = False

    def feed(self, chunk: dict[str, Any]) -> list[Event]:
        steps = self._reader.feed(chunk)
        start = [] if self._started else [self._start()]
        self._started = True
        return start + [_event(step) for step in steps]

    def finish(self) -> list[Event]:
        """The events at the end of the answer.

        Raises:
            RequestError: 502, it is not the end.
        """
        turn = self._reader.turn
        stop = _stop(turn)
        events = [_event(step) for step in self._reader.finish()]
        return [
            *events,
            {"type": "message_delta", "delta": stop, "usage": _usage(turn)},
            {"type": "message_stop"},
        ]

    def fail(self, error: RequestError) -> list[Event]:
        """The events of an answer that breaks off."""
        return [error_body("messages", error)]

    def _start(self) -> Event:
        turn = self._reader.turn
        nothing: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        return {"type": "message_start", "message": _message(turn) | nothing | {"usage": _usage(turn)}}


def _event(step: Step) -> Event:
    index = step.block.index
    if step.what == "start":
        return {
            "type": "content_block_start",
            "index": index,
            "content_block": _content_block(Block(**vars(step.block) | {"text": ""}), {}),
        }
    if step.what == "stop":
        return {"type": "content_block_stop", "index": index}
    delta = {
        "text": {"type": "text_delta", "text": step.text},
        "reasoning": {"type": "thinking_delta", "thinking": step.text},
        "call": {"type": "input_json_delta", "partial_json": step.text},
    }[step.block.kind]
    return {"type": "content_block_delta", "index": index, "delta": delta}


def _message(turn: Turn) -> dict[str, Any]:
    return {"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "model": turn.model}


def _content_block(block: Block, arguments: dict[str, Any]) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _input(arguments: str) -> dict[str, Any]:
    """A call's input. What the model wrote is kept as it is where it is no JSON object, so that the next turn can quote it."""
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {INVALID_JSON: arguments}


def _usage(turn: Turn) -> dict[str, int]:
    """Tokens; those read from the engine's prefix cache are counted apart, as Anthropic does."""
    cached = turn.cached_tokens
    return {
        "input_tokens": max(0, turn.prompt_tokens - cached),
        "cache_read_input_tokens": cached,
        "output_tokens": turn.completion_tokens,
    }


def _stop(turn: Turn) -> dict[str, Any]:
    """Why the turn ended."""
    reasons = {
        "stop": "end_turn",
        "length": "max_tokens",
        "tool_calls": "tool_use",
        "content_filter": "refusal",
    }
    reason = reasons.get(turn.finish_reason or "")
    if reason is None:
        raise RequestError(
            f"the engine's answer broke off (finish reason: {turn.finish_reason})", 503, "server_error"
        )
    if reason == "end_turn" and any(block.kind == "call" for block in turn.blocks):
        reason = "tool_use"
    if reason == "end_turn" and turn.stop_word is not None:
        return {"stop_reason": "stop_sequence", "stop_sequence": turn.stop_word}
    return {"stop_reason": reason, "stop_sequence": None}
