"""A stand-in for a judge: a server with OpenAI's API that looks for words, without a model."""

from __future__ import annotations

import contextlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import raylight as rl

WORDS = {"thanks": r"\bthank", "apology": r"\bsorry|\bapolog", "blame": r"\byour fault\b"}
CRITERIA = [
    rl.rewards.Criterion("thanks", "The answer thanks the customer."),
    rl.rewards.Criterion("apology", "The answer apologises."),
    rl.rewards.Criterion("blame", "The answer blames the customer.", weight=-1.0),
]
"""The rubric, for any judge."""


def verdict(question: str) -> str:
    """Return the scores of an attempt, in the form that `rl.rewards.rubric` asks for."""
    attempt = question.split("<attempt>")[1]
    answer = json.loads(attempt.split("</attempt>")[0].strip().splitlines()[-1])["content"].lower()
    scores = {name: {"score": float(bool(re.search(words, answer)))} for name, words in WORDS.items()}
    return json.dumps({"scores": scores})


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": verdict(body["messages"][-1]["content"])}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = {"id": "1", "object": "chat.completion", "created": 0, "model": body["model"]}
        content = json.dumps(reply | {"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log no request."""


@contextlib.contextmanager
def serve_stand_in() -> Iterator[rl.LLM]:
    """Serve the stand-in on a free port of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield rl.LLM(endpoint=f"http://127.0.0.1:{server.server_port}/v1", model="stand-in", api_key="-")
        finally:
            server.shutdown()
