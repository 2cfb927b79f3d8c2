"""Models elsewhere that answer by script: a real OpenAI-compatible server in a thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

Script = Callable[[str, str], "str | int | tuple[str, str]"]
"""Function of model name and last message. Returns a text, a text and finish reason, or an HTTP status."""


@dataclass
class Elsewhere:
    script: Script
    url: str = ""
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Every request that came: the model's name and the last message."""

    async def chat(self, request: Request) -> JSONResponse:
        body = await request.json()
        name, text = body["model"], body["messages"][-1]["content"]
        self.asked.append((name, text))
        said: Any = self.script(name, text)
        if isinstance(said, int):
            return JSONResponse({"error": {"message": "by script"}}, status_code=said)
        content, reason = said if isinstance(said, tuple) else (said, "stop")
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
def elsewhere(script: Script) -> Iterator[Elsewhere]:
    """Serve such models while the block lasts."""
    found = Elsewhere(script)
    app = Starlette(routes=[Route("/v1/chat/completions", found.chat, methods=["POST"])])
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
    found.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    try:
        yield found
    finally:
        server.should_exit = True
        thread.join(20)
