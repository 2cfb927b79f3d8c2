"""Agents outside a run: threads that open sessions of `raylight serve --learn` and reward them."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import httpx
import openai

SERVER_KEY = "server-key-0123456789"
MAX_TOKENS = 8


class Outside:
    """Agents that add two numbers, with the clients of OpenAI and Anthropic in turn."""

    def __init__(self, url: str, seed: int = 0) -> None:
        self.url = url
        self.http = httpx.Client(
            base_url=url, headers={"authorization": f"Bearer {SERVER_KEY}"}, timeout=60, trust_env=False
        )
        self.rewards: list[float] = []
        """Rewards in the order in which the server took them."""
        self.refused = 0
        self._random, self._lock = random.Random(seed), threading.Lock()

    def __enter__(self) -> Outside:
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()

    def post(self, path: str = "", **body: Any) -> httpx.Response:
        return self.http.post(f"/v1/sessions{path}", json=body)

    def begin(self, task: Any, **body: Any) -> dict[str, Any]:
        """Open a session; wait until the server has room."""
        deadline = time.monotonic() + 300
        while (answer := self.post("", task=task, **body)).status_code == 429:
            assert time.monotonic() < deadline, "the server had no room"
            self.refused += 1
            time.sleep(0.05)
        assert answer.status_code == 201, answer.text
        return answer.json()

    def reward(self, session: dict[str, Any], value: Any) -> dict[str, Any]:
        answer = self.post(f"/{session['session_id']}/reward", reward=value)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def status(self, session: dict[str, Any]) -> str:
        return self.http.get(f"/v1/sessions/{session['session_id']}").json()["status"]

    def play(self, number: int = 0) -> None:
        """Answer one question in a new session."""
        with self._lock:
            a, b = self._random.randint(10, 99), self._random.randint(10, 99)
        session = self.begin({"a": a, "b": b})
        text = (call_openai, call_anthropic)[number % 2](session, f"{a}+{b}=")
        value = 1.0 if text.strip() == str(a + b) else 0.0
        self.reward(session, value)
        self.rewards.append(value)

    def play_until(self, is_over: Callable[[], bool], threads: int = 8) -> None:
        """Open sessions, so many at a time, until there is nothing more to do."""

        def work(number: int) -> None:
            while not is_over():
                self.play(number)

        with ThreadPoolExecutor(threads) as pool:
            for done in [pool.submit(work, number) for number in range(threads)]:
                done.result()


def call_openai(session: dict[str, Any], question: str) -> str:
    with openai.OpenAI(base_url=session["base_url"], api_key=session["api_key"], max_retries=0) as client:
        reply = client.chat.completions.create(
            model=session["model"],
            max_tokens=MAX_TOKENS,
            messages=[{"role": "user", "content": question}],
        )
    return reply.choices[0].message.content or ""


def call_anthropic(session: dict[str, Any], question: str) -> str:
    with anthropic.Anthropic(
        base_url=session["base_url"], api_key=session["api_key"], max_retries=0
    ) as client:
        reply = client.messages.create(
            model="claude-of-any-name",
            max_tokens=MAX_TOKENS,
            messages=[{"role": "user", "content": question}],
        )
    return "".join(part.text for part in reply.content if part.type == "text")  # an answer may be empty
