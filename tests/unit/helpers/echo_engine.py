"""An engine of a user's own in one file: answers each chat request with the text of its last message."""

import time
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from raylight.engines.capture_context import CURRENT
from raylight.engines.protocol import EngineSettings, InferenceOnlyEngine


class EchoEngine(InferenceOnlyEngine):
    def __init__(self, settings: EngineSettings, *, suffix: str = "") -> None:
        super().__init__(settings)
        self.suffix = suffix

    async def app(self) -> ASGIApp:
        chat = Route("/v1/chat/completions", self._chat, methods=["POST"])
        return Starlette(routes=[chat, Route("/v1/models", self._models)])

    async def _chat(self, request: Request) -> JSONResponse:
        text = (await request.json())["messages"][-1]["content"] + self.suffix
        if capture := CURRENT.get():  # record the tokens of a captured call, here one per character
            sample = capture.sample(0, [0], {"temperature": 1.0})
            sample.output_ids, sample.logprobs = [ord(c) for c in text], [0.0] * len(text)
            sample.weight_versions, sample.finish_reason = [0] * len(text), "stop"
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        fields = {"id": "chatcmpl-1", "object": "chat.completion", "created": int(time.time())}
        return JSONResponse({**fields, "model": self.model, "choices": [choice]})

    async def _models(self, request: Request) -> JSONResponse:
        model: dict[str, Any] = {"id": self.model, "object": "model", "created": 0, "owned_by": "echo"}
        return JSONResponse({"object": "list", "data": [model]})
