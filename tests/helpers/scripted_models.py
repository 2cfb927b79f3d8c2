"""Scripted models behind a real OpenAI-compatible server in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

Script = Callable[[str, str], "str | int | tuple[str, str]"]
"""Function of model name and last message. Returns a text, a text and finish reason, or an HTTP status."""


@dataclass
class ScriptedModels:
    """Server application that answers every request with a script."""

    script: Script
    url: str = ""
    requests: list[tuple[str, str]] = field(default_factory=list)
    """Model name and last message of every request."""

    async def chat(self, request: Request) -> JSONResponse:
        body = await request.json()
        name, text = body["model"], body["messages"][-1]["content"]
        self.requests.append((name, text))
        reply: Any = self.script(name, text)
        if isinstance(reply, int):
            return JSONResponse({"error": {"message": "by script"}}, status_code=reply)
        content, reason = reply if isinstance(reply, tuple) else (reply, "stop")
        choice = {"index": 0, "message": {"role": "assistant", "content": content}, "finish_reason": reason}
        return JSONResponse(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 0,
                "model": name,
                "choices": [choice],
            }
        )


@contextlib.contextmanager
def serve_script(script: Script) -> Iterator[ScriptedModels]:
    """Serve models with this script until the block ends."""
    models = ScriptedModels(script)
    with serve_chat(models.chat) as models.url:
        yield models


@contextlib.contextmanager
def serve_chat(chat: Callable[[Request], Awaitable[Response]]) -> Iterator[str]:
    """Serve a function as chat completions until the block ends; the value is the base URL."""
    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    started = threading.Event()
    begin = server.startup

    async def startup(sockets: Any = None) -> None:
        await begin(sockets)
        started.set()

    server.startup = startup  # type: ignore[method-assign]
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(20)


def add_a_missing_word(model: str, text: str) -> str:
    """Reflect for GEPA: add the first word that the feedback misses to the prompt."""
    current = text.partition("for me:\n```\n")[2].partition("\n```")[0]
    words = text.partition("missing: [")[2].partition("]")[0].replace("'", "").split(", ")
    return f"```\n{current} Answer {words[0]}.\n```"
