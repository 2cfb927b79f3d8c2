"""A scripted chat application, and clients of the real SDKs in front of it."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from asgi_helpers import response_body, start, stream_start
from starlette.types import ASGIApp, Receive, Scope, Send

from raylight.serving.dialects.translate import TranslationMiddleware

NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})
WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def call(call_id: str, arguments: str, name: str = "weather") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


@dataclass
class Say:
    """One answer."""

    content: str | None = None
    reasoning: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)
    finish: str | None = None
    """Finish reason; None: the one that fits the answer."""
    stop_word: str | None = None
    status: int = 200
    error: Any = None
    """Body of an answer with another status; in a stream, an event in its middle."""
    headers: dict[str, str] = field(default_factory=dict)
    """Headers of an answer with another status."""
    named: str = "reasoning"
    """The engine's field for reasoning."""
    usage: dict[str, Any] = field(
        default_factory=lambda: {
            "prompt_tokens": 11,
            "completion_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 4},
        }
    )

    @property
    def finish_reason(self) -> str:
        return self.finish or ("tool_calls" if self.calls else "stop")

    def answer(self, number: int) -> dict[str, Any]:
        message = {
            "role": "assistant",
            "content": self.content,
            self.named: self.reasoning,
            "tool_calls": self.calls,
        }
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": self.finish_reason,
            "stop_reason": self.stop_word,
        }
        return _head(number, "chat.completion") | {"choices": [choice], "usage": self.usage}

    def chunks(self, number: int, options: Mapping[str, Any] = NO_OPTIONS) -> Iterator[dict[str, Any]]:
        """Return the chunks of a stream: texts letter by letter, arguments in threes."""
        prompt_tokens = self.usage.get("prompt_tokens", 0)
        counts = {"prompt_tokens": prompt_tokens, "completion_tokens": 0, "total_tokens": prompt_tokens}
        is_counted = options.get("include_usage") and options.get("continuous_usage_stats")
        usage = {"usage": counts} if is_counted else {}
        yield _chunk(number, {"role": "assistant", "content": ""}) | usage
        for letter in self.reasoning or "":
            yield _chunk(number, {self.named: letter})
        for letter in self.content or "":
            yield _chunk(number, {"content": letter})
        for index, made in enumerate(self.calls):
            named = {"name": made["function"]["name"], "arguments": ""}
            yield _chunk(
                number,
                {"tool_calls": [{"index": index, "id": made["id"], "type": "function", "function": named}]},
            )
            arguments = made["function"]["arguments"]
            for at in range(0, len(arguments), 3):
                piece = {"index": index, "function": {"arguments": arguments[at : at + 3]}}
                yield _chunk(number, {"tool_calls": [piece]})
        if self.error is not None:
            yield {"error": self.error}
            return
        yield _chunk(number, {}, self.finish_reason, self.stop_word)
        yield _head(number, "chat.completion.chunk") | {"choices": [], "usage": self.usage}


def _head(number: int, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{number}", "object": kind, "created": 1700000000, "model": "policy"}


def _chunk(
    number: int, delta: dict[str, Any], finish: str | None = None, stop_word: str | None = None
) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish, "stop_reason": stop_word}
    return _head(number, "chat.completion.chunk") | {"choices": [choice]}


SAYS = {
    "text": Say("hello"),
    "reasoning and text": Say("hello", reasoning="hm"),
    "deepseek's word for reasoning": Say("hello", reasoning="hm", named="reasoning_content"),
    "parallel calls": Say(
        "let me see", calls=[call("t1", '{"city": "Bern"}'), call("t2", '{"city": "Zürich"}')]
    ),
    "a call without arguments": Say(calls=[call("t1", "")]),
    "nothing": Say(""),
}
"""Answers that every dialect streams as the same answer in one piece."""
BREAKS = [Say("hel", error={"message": "lost", "code": 503}), Say("hel", finish="abort")]
"""Answers that break off in a stream."""
VLLM_ERROR = {"error": {"message": "too long", "type": "BadRequestError", "code": 400}}
OLD_VLLM_ERROR = {"object": "error", "message": "too long", "type": "NotFoundError", "code": 404}


class FakeChat:
    """Scripted chat application: it sends the answers of `says` in turn, and records requests and scopes."""

    def __init__(self, *says: Say) -> None:
        self.says = list(says)
        self.asked: list[dict[str, Any]] = []
        self.scopes: list[Scope] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scopes.append(scope)
        self.asked.append(json.loads((await receive())["body"]))
        if scope["path"] == "/tokenize":
            await _send_json(send, 200, {"count": 5, "max_model_len": 64, "tokens": [1, 2, 3, 4, 5]})
            return
        number, say = len(self.asked), self.says.pop(0)
        if say.status != 200:
            await _send_json(send, say.status, say.error, **say.headers)
        elif not self.asked[-1].get("stream"):
            await _send_json(send, 200, say.answer(number))
        else:
            await send(stream_start())
            for chunk in say.chunks(number, self.asked[-1].get("stream_options") or {}):
                await send(response_body(b"data: %s\n\n" % json.dumps(chunk).encode(), more=True))
            await send(response_body(b"data: [DONE]\n\n"))


async def _send_json(send: Send, status: int, answer: Any, **more: str) -> None:
    content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
    kind = "text/plain" if isinstance(answer, str) else "application/json"
    await send(start(status, content_type=kind, **more))
    await send(response_body(content))


def translated(*says: Say) -> tuple[FakeChat, ASGIApp]:
    fake = FakeChat(*says)
    return fake, TranslationMiddleware(fake)
