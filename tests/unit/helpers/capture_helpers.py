"""Fakes around capture: a sink, an engine's application, and a client that is driven step by step."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from asgi_helpers import response_body, start, stream_start
from starlette.types import ASGIApp, Message, Receive, Send
from starlette.types import Scope as AsgiScope
from unit_helpers import within

from raylight.engines.capture_context import CURRENT, SCOPE, AttemptScope, CaptureContext
from raylight.engines.protocol import EngineLoad
from raylight.serving.capture.recorder import ClosedCall, OpenedCall
from raylight.types import CallKey

INSIDE = AttemptScope("ro-1", "at-1")
ENGINE: Any = SimpleNamespace(kind="fake", model="policy", tokenizer=None, max_model_len=64, load=EngineLoad)
ASKED = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


class Sink:
    """A sink that records what it receives.

    `gate` delays it, `error` makes it fail, and attempts in `over` are rejected.
    """

    def __init__(self) -> None:
        self.opened: list[OpenedCall] = []
        self.closed: list[ClosedCall] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.received = asyncio.Condition()
        self.error: Exception | None = None
        self.over: set[str] = set()
        self.at_once = self.most_at_once = self.tries = 0

    async def __call__(self, opened: list[OpenedCall], closed: list[ClosedCall]) -> Sequence[CallKey]:
        self.tries += 1
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            await self.gate.wait()
            if self.error:
                raise self.error
            async with self.received:
                self.opened += opened
                self.closed += closed
                self.received.notify_all()
            return [key for key, _ in opened if key.attempt_id in self.over]
        finally:
            self.at_once -= 1

    async def has(self, opened: int, closed: int) -> None:
        async with within(), self.received:
            await self.received.wait_for(lambda: len(self.opened) >= opened and len(self.closed) >= closed)


def add_token(sample: Any, token: int, logprob: float = -0.5, version: int = 0) -> None:
    """Record a sampled token, as an engine does."""
    sample.output_ids.append(token)
    sample.logprobs.append(logprob)
    sample.weight_versions.append(version)


async def settle() -> None:
    """Run all tasks that are ready."""
    for _ in range(30):
        await asyncio.sleep(0)


class FakeApp:
    """An engine's application that samples each choice letter by letter; `gate` stops it after the first.

    `first_gate` stops it before the first, when a streamed answer has been started.

    Attributes:
        listens: True if it stops by itself when its client disconnects, as vLLM's does.
        breaks_at: number of letters after which it raises.
        status: status of its answers; from 400 on it samples nothing.
        answer_id: id of its answers; None: that of the call.
    """

    def __init__(self, answer: str = "hello") -> None:
        self.answer = answer
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.contexts: list[CaptureContext | None] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.first_gate = asyncio.Event()
        self.first_gate.set()
        self.sampling = asyncio.Event()
        self.listens = False
        self.breaks_at: int | None = None
        self.status = 200
        self.answer_id: str | None = None
        self.samples = True
        self.cancelled = self.disconnects = 0

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        body = json.loads((await receive())["body"])
        self.requests.append(body)
        self.headers.append(dict(scope["headers"]))
        self.contexts.append(CURRENT.get())
        answering = asyncio.ensure_future(
            self._answer(body, scope["path"].startswith("/v1/chat"), send, dict(scope["headers"]))
        )
        try:
            if self.listens:
                leaving = asyncio.ensure_future(receive())
                await asyncio.wait([answering, leaving], return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    assert leaving.result() == {"type": "http.disconnect"}
                    self.disconnects += 1
                    answering.cancel()
                    await asyncio.wait([answering])
                    await send_json(send, None)  # as FastAPI does for a handler that returns nothing
                    return
                leaving.cancel()
            await answering
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def _answer(
        self, body: dict[str, Any], chat: bool, send: Send, headers: dict[bytes, bytes]
    ) -> None:
        if self.status >= 400:
            await send_json(
                send, {"error": {"message": "no", "type": "t", "param": None, "code": None}}, self.status
            )
            return
        n = body.get("n") or 1
        streams, context = bool(body.get("stream")), CURRENT.get()
        given = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        prompt = given or [ord(c) for m in body.get("messages", []) for c in m["content"]] or [1]
        name = self.answer_id or headers.get(b"x-request-id", b"x").decode()
        answer_id = f"{'chatcmpl' if chat else 'cmpl'}-{name}"
        head: dict[str, Any] = {"id": answer_id, "object": "x", "created": 0, "model": "policy"}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(self.answer), "total_tokens": 99}
        samples = []
        if context and self.samples:
            samples = [context.sample(i, prompt, {"temperature": 0.5}) for i in range(n)]
        if streams:
            await send(stream_start())
        await self.first_gate.wait()
        for place, letter in enumerate(self.answer):
            if place == self.breaks_at:
                raise RuntimeError("the engine died")
            for sample in samples:
                add_token(sample, ord(letter), version=3)
            self.sampling.set()
            for i in range(n if streams else 0):
                await send_event(send, head | {"choices": [chunk(i, letter, chat)]})
            await self.gate.wait()
        for sample in samples:
            sample.finish_reason = "stop"
        if streams:
            for i in range(n):
                await send_event(send, head | {"choices": [chunk(i, "", chat) | {"finish_reason": "stop"}]})
            await send_event(send, "[DONE]")
            await send(response_body())
            return
        await send_json(
            send, head | {"choices": [whole(i, self.answer, chat) for i in range(n)], "usage": usage}
        )


def chunk(index: int, text: str, chat: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"delta": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"index": index, "finish_reason": None} | said


def whole(index: int, text: str, chat: bool) -> dict[str, Any]:
    said: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    return {"index": index, "finish_reason": "stop"} | said


async def send_json(send: Send, content: Any, status: int = 200) -> None:
    await send(start(status, content_type="application/json"))
    await send(response_body(json.dumps(content).encode()))


async def send_event(send: Send, data: Any) -> None:
    text = data if isinstance(data, str) else json.dumps(data)
    await send(response_body(f"data: {text}\n\n".encode(), more=True))


class Call:
    """One request, driven step by step: its client may disconnect, and its answer can be read while it
    arrives.
    """

    def __init__(
        self,
        app: ASGIApp,
        body: Any,
        path: str = "/v1/chat/completions",
        attempt: AttemptScope | None = INSIDE,
        **headers: str,
    ) -> None:
        self.sent: list[Message] = []
        self.left = asyncio.Event()
        self.begun = asyncio.Event()
        self.over = asyncio.Event()
        self.lose_answer = False
        self._body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self._given = False
        pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [
                (b"content-type", b"application/json"),
                (b"content-length", str(len(self._body)).encode()),
                *pairs,
            ],
        }
        token = SCOPE.set(attempt)
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))
        SCOPE.reset(token)

    async def _receive(self) -> Message:
        if not self._given:
            self._given = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        waiting = [asyncio.ensure_future(event.wait()) for event in (self.left, self.over)]
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiting:
                waiter.cancel()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self.lose_answer:
            self.left.set()
            raise OSError("the client is gone")
        self.sent.append(message)
        self.begun.set()
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.over.set()

    async def answered(self) -> Call:
        """Wait for the end of the answer."""
        async with within():
            await self.task
        return self

    @property
    def status(self) -> int:
        return self.sent[0]["status"]

    @property
    def headers(self) -> dict[bytes, bytes]:
        return dict(self.sent[0]["headers"])

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def json(self) -> Any:
        return json.loads(self.body)
