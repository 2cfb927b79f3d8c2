"""OpenAI's responses dialect: chat answers as its responses, whole or streamed."""

from __future__ import annotations

from typing import Any

from raylight.engines.capture_context import AttemptScope
from raylight.http.errors import RequestError
from raylight.serving.dialects.response_history import EarlierResponses
from raylight.serving.dialects.responses import ResponsesRequest
from raylight.serving.dialects.responses_input import item_id
from raylight.serving.dialects.turns import Block, BlockReader, Step, Turn, read_turn

Event = dict[str, Any]
"""The data of an event, whose name is its `type`."""

_PREFIXES = {"text": "msg", "reasoning": "rs", "call": "fc"}
_TEXTS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
_CUT = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why a response is incomplete, by the reason of its end."""


class Responses:
    """One request to `/v1/responses` and its answer.

    Args:
        earlier: where conversations to be continued are found and remembered.
        scope: the attempt that asks; it finds only its own.
    """

    path = "/v1/chat/completions"

    def __init__(self, earlier: EarlierResponses, scope: AttemptScope | None) -> None:
        self._earlier = earlier
        self._scope = scope
        self._asked = ResponsesRequest(model="")
        self._messages: list[dict[str, Any]] = []

    def request(self, body: Any) -> dict[str, Any]:
        self._asked = asked = ResponsesRequest.read(body)
        before = (
            self._earlier.find(self._scope, asked.previous_response_id) if asked.previous_response_id else []
        )
        self._messages = before + asked.messages()
        if not self._messages:
            raise RequestError("input: there is none")
        return asked.to_chat(self._messages)

    def answer(self, chat: dict[str, Any]) -> dict[str, Any]:
        """A response.

        Raises:
            RequestError: 502, the chat answer is none; 503, it broke off.
        """
        return self.ended(read_turn(chat))

    def stream(self) -> ResponsesStream:
        return ResponsesStream(self)

    def ended(self, turn: Turn) -> dict[str, Any]:
        """The response of a turn that is over; it may be continued from now on.

        Raises:
            RequestError: 503, the turn broke off.
        """
        if turn.finish_reason not in ("stop", "tool_calls", *_CUT):
            raise RequestError(
                f"the engine's answer broke off (finish reason: {turn.finish_reason})", 503, "server_error"
            )
        cut = _CUT.get(turn.finish_reason)
        response = self.response(turn, "incomplete" if cut else "completed") | {
            "output": [_item(turn, block, _status(turn, block)) for block in turn.blocks],
            "incomplete_details": {"reason": cut} if cut else None,
            "usage": _usage(turn),
        }
        if self._asked.store:
            self._earlier.remember(self._scope, response["id"], [*self._messages, turn.message()])
        return response

    def response(self, turn: Turn, status: str) -> dict[str, Any]:
        """A response without its output."""
        head = {
            "id": f"resp_{turn.id}",
            "object": "response",
            "created_at": turn.created,
            "model": turn.model,
            "status": status,
        }
        return (
            head
            | {"output": [], "error": None, "incomplete_details": None, "usage": None}
            | self._asked.echo()
        )


class ResponsesStream:
    """Turns the chunks of a chat answer into events.

    Args:
        asked: the request that is answered.
    """

    def __init__(self, asked: Responses) -> None:
        self._asked = asked
        self._reader = BlockReader()
        self._number = 0

    def feed(self, chunk: dict[str, Any]) -> list[Event]:
        steps = self._reader.feed(chunk)
        return [*self._start(), *(event for step in steps for event in self._events(step))]

    def finish(self) -> list[Event]:
        """The events at the end of the answer.

        Raises:
            RequestError: 503, it is not the end.
        """
        steps = self._reader.finish()
        response = self._asked.ended(self._reader.turn)
        events = [event for step in steps for event in self._events(step)]
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def fail(self, error: RequestError) -> list[Event]:
        """The events of an answer that breaks off."""
        start = self._start()
        response = self._asked.response(self._reader.turn, "failed")
        told = self._event("error", code="server_error", message=str(error), param=None)
        failed = self._event(
            "response.failed", response=response | {"error": {"code": "server_error", "message": str(error)}}
        )
        return [*start, told, failed]

    def _start(self) -> list[Event]:
        if self._number:
            return []
        response = self._asked.response(self._reader.turn, "in_progress")
        return [self._event(name, response=response) for name in ("response.created", "response.in_progress")]

    def _events(self, step: Step) -> list[Event]:
        block = step.block
        item = _item(self._reader.turn, block, _status(self._reader.turn, block))
        place: dict[str, Any] = {"output_index": block.index, "item_id": item["id"]}
        if block.kind != "call":
            place["content_index"] = 0
        logprobs: dict[str, Any] = {"logprobs": []} if block.kind == "text" else {}
        text, part = f"response.{_TEXTS[block.kind]}", "response.content_part"
        if step.what == "delta":
            return [self._event(f"{text}.delta", **place, delta=step.text, **logprobs)]
        if step.what == "start":
            empty = Block(block.kind, block.index, call_id=block.call_id, name=block.name)
            fresh = _item(self._reader.turn, empty, "in_progress")
            parts = fresh.pop("content", [])
            begun = fresh if block.kind == "call" else fresh | {"content": []}
            added = [self._event("response.output_item.added", output_index=block.index, item=begun)]
            return added + [self._event(f"{part}.added", **place, part=only) for only in parts]
        whole = {"arguments": block.text} if block.kind == "call" else {"text": block.text}
        done = [self._event(f"{text}.done", **place, **whole, **logprobs)]
        done += [self._event(f"{part}.done", **place, part=only) for only in item.get("content", [])]
        return [*done, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _event(self, name: str, **fields: Any) -> Event:
        event = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return event


def _status(turn: Turn, block: Block) -> str:
    cut = turn.finish_reason in _CUT and block is turn.blocks[-1]
    return "incomplete" if cut else "completed"


def _item(turn: Turn, block: Block, status: str) -> dict[str, Any]:
    """An item of the output."""
    head = {"id": item_id(_PREFIXES[block.kind], turn.id, block.index), "status": status}
    if block.kind == "call":
        return head | {
            "type": "function_call",
            "call_id": block.call_id,
            "name": block.name,
            "arguments": block.text,
        }
    if block.kind == "reasoning":
        return head | {
            "type": "reasoning",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": block.text}],
        }
    said = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
    return head | {"type": "message", "role": "assistant", "content": [said]}


def _usage(turn: Turn) -> dict[str, Any]:
    return {
        "input_tokens": turn.prompt_tokens,
        "input_tokens_details": {"cached_tokens": turn.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": turn.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": turn.reasoning_tokens},
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
    }
