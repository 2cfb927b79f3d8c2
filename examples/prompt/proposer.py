"""Stand-in for the language model that criticises and rewrites prompts: it draws rewrites from a list."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

CRITIC, EDITOR = "critic", "editor"
"""Names of the two models that it serves."""
CRITIQUE = "The answers are stray digits. Fewer words around the numbers may help."
REWRITES = (
    "Add {a}.",  # lacks a placeholder, and is rejected
    "{a} plus {b}",
    "{a} plus {b} =",
    "{a} + {b} = ",
    "{a}+{b}=",
    "Sum: {a}, {b}",
    "What is {a}+{b}?",
    "Compute {a}+{b}",
)


@contextlib.contextmanager
def templated_proposer(seed: int) -> Iterator[str]:
    """Serve OpenAI's API with one critique and rewrites in a random order; yield the base URL."""
    chance, left = random.Random(seed), list[str]()

    async def chat(request: Request) -> JSONResponse:
        text = CRITIQUE
        if (await request.json())["model"] == EDITOR:
            if not left:
                left.extend(chance.sample(REWRITES, len(REWRITES)))
            text = f"<prompt>{left.pop()}</prompt>"
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        return JSONResponse(
            {"id": "chatcmpl-0", "object": "chat.completion", "created": 0, "model": "-", "choices": [choice]}
        )

    app = Starlette(routes=[Route("/v1/chat/completions", chat, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    listening = socket.create_server(("127.0.0.1", 0))  # from here on, clients can connect
    thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(10)
