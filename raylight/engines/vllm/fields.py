"""Rejection of request fields that vLLM would silently ignore, and of values that it cannot serve."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest

from raylight.engines.vllm.images import take_images
from raylight.engines.vllm.schemas import SchemaCheck, constraining_schemas
from raylight.http.body import DESCRIBED_PROBLEMS, UNKNOWN_PARAMETER, ignore_hint
from raylight.http.errors import RequestError, error_response
from raylight.http.field_bounds import check_answer_size
from raylight.http.request import JsonRequest, json_request
from raylight.types.chat_messages import INVALID_JSON, arguments_for_template
from raylight.types.request_fields import LABELS, log_dropped

logger = logging.getLogger(__name__)


def _field_names(model: type[BaseModel]) -> frozenset[str]:
    aliases = (field.alias for field in model.model_fields.values())
    return LABELS | {"modalities"} | model.model_fields.keys() | {alias for alias in aliases if alias}


NO_BUDGETS = (
    "vLLM enforces only with the arguments reasoning_parser and reasoning_config (or thinking.budget_tokens)"
)
NO_THOUGHTS = (
    "a request holds an answer to a schema, and vLLM does so from the first token, so that the model cannot "
    "think before; with engine.args.reasoning_parser, such as qwen3, vLLM begins after the reasoning"
)
LIMITS = ("max_tokens", "max_completion_tokens")
KNOWN = {
    "/v1/chat/completions": _field_names(ChatCompletionRequest),
    "/v1/completions": _field_names(CompletionRequest),
}


class RejectUnknownFields:
    """ASGI middleware that rejects completion requests which vLLM would partly ignore or could never serve.

    Args:
        app: vLLM's application.
        max_choices: choices that may wait or be sampled concurrently; None: no limit.
        max_model_len: longest prompt plus response, in tokens. A limit of at least this length is dropped,
            because vLLM would reject it instead of answering up to its own limit.
        thinking_budgets: True if vLLM was started so that it can enforce `thinking_token_budget`.
        schemas: check of schemas; None if vLLM constrains answers without xgrammar.
        unparsed_reasoning: True if the model thinks before it answers, and vLLM does not parse that.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_choices: int | None,
        max_model_len: int,
        thinking_budgets: bool = False,
        schemas: SchemaCheck | None = None,
        unparsed_reasoning: bool = False,
    ) -> None:
        self._app = app
        self._max_choices = max_choices
        self._max_model_len = max_model_len
        self._thinking_budgets = thinking_budgets
        self._schemas = schemas
        self._unparsed_reasoning = unparsed_reasoning

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        known = KNOWN.get(scope.get("path", "")) if scope.get("method") == "POST" else None
        if known is None:
            await self._app(scope, receive, send)
            return
        try:
            request = await json_request(scope, receive)
            self._check(request.fields, known)
            if self._schemas is not None:
                await self._schemas.check(request.fields)
            replaced = await take_images(request.fields)
        except RequestError as error:
            await error_response(error)(scope, receive, send)
        else:
            request = _show_calls(request, receive)
            request = JsonRequest(request.fields | replaced, receive) if replaced else request
            if self._unparsed_reasoning and any(constraining_schemas(request.fields)):
                self._unparsed_reasoning = False  # logged once
                logger.warning(NO_THOUGHTS)
            dropped = [*_invalid_labels(request.fields), *self._unenforced(request.fields, scope["path"])]
            if dropped:
                request = JsonRequest(request.fields | dict.fromkeys(dropped), receive)
            await self._app(request.put_into(scope), request, send)

    def _unenforced(self, body: Mapping[str, object], path: str) -> list[str]:
        """Return the fields of a chat request with limits that vLLM cannot enforce."""
        if path != "/v1/chat/completions":
            return []
        names = [name for name in LIMITS if type(n := body.get(name)) is int and n >= self._max_model_len]
        if body.get("thinking_token_budget") is not None and not self._thinking_budgets:
            log_dropped("thinking_token_budget", NO_BUDGETS)
            names.append("thinking_token_budget")
        return names

    def _check(self, body: Mapping[str, object], known: frozenset[str]) -> None:
        if unknown := sorted(body.keys() - known):
            names = [f"{name:.100}" for name in unknown[:DESCRIBED_PROBLEMS]]
            described = "; ".join(f"{name}: this field is not supported" for name in names)
            more = f"; and {len(unknown) - len(names)} more" if len(unknown) > len(names) else ""
            raise RequestError(described + more + ignore_hint(names), code=UNKNOWN_PARAMETER)
        if body.get("modalities") not in (None, ["text"]):
            raise RequestError("modalities: this engine answers with text only")
        count = _count_choices(body)
        if self._max_choices is not None and count > self._max_choices:
            raise RequestError(
                f"n: this engine takes at most {self._max_choices} choices at a time; the request has {count}"
            )
        check_answer_size(count, self._most_tokens(body), _count_logprobs(body))

    def _most_tokens(self, body: Mapping[str, object]) -> int:
        """Return the most tokens of a choice."""
        limits = [n for name in LIMITS if type(n := body.get(name)) is int]
        return min([*limits, self._max_model_len])


def _show_calls(request: JsonRequest, receive: Receive) -> JsonRequest:
    """Return a request whose earlier calls have arguments in JSON objects; vLLM would leave out others."""
    messages = request.fields.get("messages")
    shown = [_show_message_calls(message) for message in messages] if isinstance(messages, list) else messages
    if shown == messages:
        return request.with_receive(receive)
    return JsonRequest(request.fields | {"messages": shown}, receive)


def _show_message_calls(message: Any) -> object:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        return message
    shown = []
    for call in calls:
        arguments = arguments_for_template(call["function"].get("arguments"))
        if INVALID_JSON in arguments:
            call = {**call, "function": call["function"] | {"arguments": json.dumps(arguments)}}
        shown.append(call)
    return {**message, "tool_calls": shown}


def _invalid_labels(body: Mapping[str, object]) -> list[str]:
    """Return the labels with values that vLLM rejects. They have no effect in any case."""
    return [] if isinstance(body.get("user"), str | None) else ["user"]


def _count_logprobs(body: Mapping[str, object]) -> int:
    """Return the number of log-probs of each token besides its own."""
    numbers = [n for name in ("top_logprobs", "logprobs") if type(n := body.get(name)) is int]
    return max([*numbers, 0])


def _count_choices(body: Mapping[str, object]) -> int:
    """Return the number of choices of a request. vLLM itself rejects an `n` that is not a number."""
    n, prompt = body.get("n"), body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else 1
    return (n if type(n) is int else 1) * prompts
