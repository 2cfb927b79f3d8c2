"""OpenAI's responses dialect: requests as chat requests, and chat answers as its responses."""

from __future__ import annotations

import time
from contextlib import suppress
from sys import getsizeof

from cachetools import LRUCache

from raylight.engines.capture_context import AttemptScope
from raylight.http.errors import CONTEXT_LENGTH, RequestError
from raylight.semconv import RESPONSES_SPAN
from raylight.serving.dialects.answers import Block, BlockReader, Step, Turn, read_turn
from raylight.serving.dialects.dialect import AnswerStream, Dialect, Event, Translation
from raylight.serving.dialects.responses_request import (
    ID_PREFIXES,
    GivenTools,
    ResponsesRequest,
    custom_input,
    item_id,
)
from raylight.types import JsonObject

TEXT_NAMES = {
    "text": "output_text",
    "reasoning": "reasoning_text",
    "function": "function_call_arguments",
    "custom": "custom_tool_call_input",
}
"""Names of a block's text in events, by the kind of the block or of the called tool."""
INCOMPLETE_REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Reasons of an incomplete response, by the engine's finish reason."""

FAILURE_CODES = {429: "rate_limit_exceeded"}
"""Codes of a failed response, by the HTTP status of its error."""
CAPACITY = 128 * 2**20
"""Memory of all conversations kept, and of all items, in bytes."""
OVERHEAD = 300
"""Memory of an object besides its values, in bytes."""


class ResponsesDialect(Dialect):
    """OpenAI's responses. Each replica remembers its own recent ones, which requests may name."""

    name = "responses"
    path = "/v1/responses"
    span_name = RESPONSES_SPAN
    id_prefix = "resp_"
    prompt_field = "input"

    def __init__(self, history: ResponseHistory | None = None) -> None:
        self._history = history or ResponseHistory()

    def translate(self, path: str, body: JsonObject, scope: AttemptScope | None) -> Translation:
        request = ResponsesRequest.read(self._history.resolve_references(scope, body))
        return ResponsesTranslation(request, self._history, scope)


class ResponsesTranslation(Translation):
    """A request to `/v1/responses`.

    Args:
        history: conversations that requests may continue.
        scope: the attempt that calls; it finds its own responses only.

    Raises:
        RequestError: 400, the input is missing, or the previous response does not exist.
    """

    def __init__(
        self, request: ResponsesRequest, history: ResponseHistory, scope: AttemptScope | None
    ) -> None:
        self._request = request
        self._history = history
        self._scope = scope
        previous = request.previous_response_id
        earlier = history.find(scope, previous) if previous else []
        self._messages = earlier + request.messages()
        if not self._messages:
            raise RequestError("input: it is empty; send at least one message")
        self.tools = request.given_tools()
        self.dropped_tools = self.tools.dropped
        chat = request.to_chat(self._messages, self.tools)
        self.model = str(chat.get("model", ""))
        super().__init__(chat, request.field_names(len(earlier), self.tools))

    def write_answer(self, answer: JsonObject) -> JsonObject:
        return self.complete(read_turn(answer))

    def start_stream(self) -> ResponsesStream:
        return ResponsesStream(self)

    def complete(self, turn: Turn) -> JsonObject:
        """Return the response of a complete turn, and remember it unless the request forbids that.

        Raises:
            RequestError: 503, the turn is incomplete.
        """
        if turn.finish_reason not in ("stop", "tool_calls", *INCOMPLETE_REASONS):
            raise turn.incomplete_error()
        reason = INCOMPLETE_REASONS.get(turn.finish_reason)
        response = self.response(turn, "incomplete" if reason else "completed") | {
            "output": [_item(self.tools, turn, block, _status(turn, block)) for block in turn.blocks],
            "incomplete_details": {"reason": reason} if reason else None,
            "usage": _usage(turn),
        }
        if self._request.store:
            self._history.remember(self._scope, response["id"], [*self._messages, turn.message()])
            self._history.remember_items(self._scope, response["output"])
        return response

    def response(self, turn: Turn, status: str) -> JsonObject:
        """Return a response without output."""
        head = {
            "id": f"resp_{turn.id}",
            "object": "response",
            "created_at": turn.created,
            "model": turn.model,
            "status": status,
        }
        empty: JsonObject = {"output": [], "error": None, "incomplete_details": None, "usage": None}
        return head | empty | self._request.echo()


class ResponsesStream(AnswerStream):
    """Writer of a streamed response."""

    def __init__(self, translation: ResponsesTranslation) -> None:
        self._translation = translation
        self._reader = BlockReader()
        self._sequence_number = 0

    def feed(self, chunk: JsonObject) -> list[Event]:
        steps = self._reader.feed(chunk)
        return [*self._start(), *(event for step in steps for event in self._events(step))]

    def finish(self) -> list[Event]:
        steps = self._reader.finish()
        response = self._translation.complete(self._reader.turn)
        events = [event for step in steps for event in self._events(step)]
        return [*events, self._event(f"response.{response['status']}", response=response)]

    def fail(self, error: RequestError, error_body: Event) -> list[Event]:
        start = self._start()
        code = FAILURE_CODES.get(error.status, "invalid_prompt" if error.status < 500 else "server_error")
        if error.code == CONTEXT_LENGTH:  # clients shorten their history for this code alone
            code = CONTEXT_LENGTH
        failure = {"code": code, "message": error.message}
        response = self._translation.response(self._reader.turn, "failed") | {"error": failure}
        return [
            *start,
            self._event("error", **failure, param=None),
            self._event("response.failed", response=response),
        ]

    def keep_alive(self) -> list[Event]:
        # Codex's limit of silence does not count comments; other clients expect `response.created` first
        if self._sequence_number:
            return [self._event("keepalive")]
        if not self.answer_id:
            return []
        turn = self._reader.turn
        turn.id, turn.model, turn.created = self.answer_id, self._translation.model, int(time.time())
        return self._start()

    def _start(self) -> list[Event]:
        if self._sequence_number:
            return []
        response = self._translation.response(self._reader.turn, "in_progress")
        return [self._event(name, response=response) for name in ("response.created", "response.in_progress")]

    def _events(self, step: Step) -> list[Event]:
        turn, block, tools = self._reader.turn, step.block, self._translation.tools
        kind, is_call = _kind(tools, block), block.kind == "call"
        position: JsonObject = {"output_index": block.index, "item_id": _id_of(turn, block, kind)}
        if not is_call:
            position["content_index"] = 0
        logprobs: JsonObject = {"logprobs": []} if block.kind == "text" else {}
        text, part = f"response.{TEXT_NAMES[kind]}", "response.content_part"
        if step.kind == "delta":
            if kind == "custom":  # its input is a part of the arguments, and known at their end
                return []
            return [self._event(f"{text}.delta", **position, delta=step.text, **logprobs)]
        if step.kind == "start":
            empty = Block(block.kind, block.index, call_id=block.call_id, name=block.name)
            new_item = _item(tools, turn, empty, "in_progress")
            parts = new_item.pop("content", [])
            started = new_item if is_call else new_item | {"content": []}
            added = [self._event("response.output_item.added", output_index=block.index, item=started)]
            return added + [self._event(f"{part}.added", **position, part=one) for one in parts]
        item = _item(tools, turn, block, _status(turn, block))
        if kind == "custom":
            done = [self._event(f"{text}.delta", **position, delta=item["input"])]
            done.append(self._event(f"{text}.done", **position, input=item["input"]))
        else:
            full_text = {"name": item["name"], "arguments": block.text} if is_call else {"text": block.text}
            done = [self._event(f"{text}.done", **position, **full_text, **logprobs)]
        done += [self._event(f"{part}.done", **position, part=one) for one in item.get("content", [])]
        return [*done, self._event("response.output_item.done", output_index=block.index, item=item)]

    def _event(self, name: str, /, **fields: object) -> Event:
        event = {"type": name, "sequence_number": self._sequence_number, **fields}
        self._sequence_number += 1
        return event


def _status(turn: Turn, block: Block) -> str:
    was_cut = turn.finish_reason in INCOMPLETE_REASONS and block is turn.blocks[-1]
    return "incomplete" if was_cut else "completed"


def _kind(tools: GivenTools, block: Block) -> str:
    return tools.of(block.name).kind if block.kind == "call" else block.kind


def _id_of(turn: Turn, block: Block, kind: str) -> str:
    return item_id(ID_PREFIXES[kind], turn.id, block.index)


def _item(tools: GivenTools, turn: Turn, block: Block, status: str) -> JsonObject:
    head = {"id": _id_of(turn, block, _kind(tools, block)), "status": status}
    if block.kind == "call":
        tool = tools.of(block.name)
        call = {"call_id": block.call_id, "name": tool.name}
        if tool.namespace is not None:
            call["namespace"] = tool.namespace
        if tool.kind == "custom":
            return head | {"type": "custom_tool_call"} | call | {"input": custom_input(block.text)}
        return head | {"type": "function_call"} | call | {"arguments": block.text}
    if block.kind == "reasoning":
        content = [{"type": "reasoning_text", "text": block.text}]
        return head | {"type": "reasoning", "summary": [], "content": content}
    text = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
    return head | {"type": "message", "role": "assistant", "content": [text]}


def _usage(turn: Turn) -> JsonObject:
    return {
        "input_tokens": turn.prompt_tokens,
        "input_tokens_details": {"cached_tokens": turn.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": turn.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": turn.reasoning_tokens},
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
    }


class ResponseHistory:
    """Conversations up to each response, and the items of each response.

    The least recently used ones are dropped first.

    Args:
        capacity: bytes to keep of conversations, and of items. A conversation counts once for each of its
            responses, although these share its messages.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._conversations: LRUCache[tuple[AttemptScope | None, str], list[JsonObject]] = LRUCache(
            capacity, getsizeof=_size
        )
        self._items: LRUCache[tuple[AttemptScope | None, str], JsonObject] = LRUCache(
            capacity, getsizeof=_size
        )

    def remember(self, scope: AttemptScope | None, response_id: str, messages: list[JsonObject]) -> None:
        """Keep the chat messages up to a response, without instructions, which hold for one request only."""
        with suppress(ValueError):  # one conversation is larger than the cache
            self._conversations[scope, response_id] = messages

    def remember_items(self, scope: AttemptScope | None, items: list[JsonObject]) -> None:
        for item in items:
            with suppress(ValueError):  # one item is larger than the cache
                self._items[scope, item["id"]] = item

    def find(self, scope: AttemptScope | None, response_id: str) -> list[JsonObject]:
        """Return the messages up to a response.

        Raises:
            RequestError: 400, another replica or attempt made the response, or it has been dropped.
        """
        try:
            return self._conversations[scope, response_id]
        except KeyError:
            error = _missing("previous_response_id", f"response {response_id!r:.200}")
            raise RequestError(error, code="previous_response_not_found") from None

    def resolve_references(self, scope: AttemptScope | None, body: JsonObject) -> JsonObject:
        """Return a request in whose input earlier items stand for the references to them.

        Raises:
            RequestError: 404, an item is missing, for the reasons of `find`.
        """
        given = body.get("input")
        if not isinstance(given, list) or not any(map(_is_reference, given)):
            return body
        items = list(given)
        for index, item in enumerate(given):
            if _is_reference(item):
                try:
                    items[index] = self._items[scope, item["id"]]
                except KeyError:
                    error = _missing(f"input[{index}]", f"item {item['id']!r:.200}")
                    raise RequestError(error, 404, param=f"input[{index}]") from None
        return body | {"input": items}


def _is_reference(item: object) -> bool:
    return (
        isinstance(item, dict)
        and isinstance(item.get("id"), str)
        and (item.get("type") == "item_reference" or item.keys() == {"id"})
    )


def _missing(field: str, what: str) -> str:
    return (
        f"{field}: there is no {what} here. A replica remembers its own recent responses of the same "
        "attempt, unless they were made with store=false. Send the whole conversation as input."
    )


def _size(value: object) -> int:
    """Return the memory of messages, in bytes."""
    if isinstance(value, dict):
        return sum(map(_size, value.values())) + OVERHEAD
    if isinstance(value, list):
        return sum(map(_size, value)) + OVERHEAD
    return getsizeof(value)
