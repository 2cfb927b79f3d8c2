"""Memory of a replica: what it keeps of attempts takes no more than its bounds, in bytes really allocated."""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from conversation_helpers import TOKENIZERS
from starlette.types import Message, Receive, Scope, Send

from raylight.engines.capture_context import SCOPE, AttemptScope
from raylight.serving.capture.middleware import ConversationLoader
from raylight.serving.capture.retry_cache import RetryCache
from raylight.serving.conversations.conversations import Conversations
from raylight.serving.dialects.responses import ResponseHistory

CAPACITY = 2**18
MORE = 4
"""The kept items would take this many times the capacity."""
SLACK = 1.3
"""Memory in proportion to the counted bytes."""
HEADERS = [(f"x-header-{n}".encode(), b"some value of usual length") for n in range(8)]


async def allocated(fill: Callable[[], Awaitable[None]]) -> int:
    """Return the bytes that a function leaves allocated."""
    gc.freeze()  # the collection below visits only what is new
    tracemalloc.start(1)
    try:
        await fill()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("attempts", [1, 150], ids=["one attempt", "many attempts"])
@pytest.mark.parametrize("text", ["", "a word and another one " * 40], ids=["short", "long"])
async def test_conversations(attempts: int, text: str) -> None:
    conversations = Conversations(TOKENIZERS["chatml"], CAPACITY)
    tools = {"name": "f", "arguments": json.dumps({"x": "y" * 20})}
    answer = {"content": text, "tool_calls": [{"id": "c", "type": "function", "function": tools}]}

    async def fill() -> None:
        for number in range(MORE * CAPACITY // (2_500 + 2 * len(text))):
            scope = AttemptScope("ro-1", f"at-{number % attempts}")
            message = {"role": "user", "content": f"question {number} {text}"}
            sent = conversations.read(scope, {"messages": [message]})
            conversations.remember(sent, answer, np.array([number, *range(100)], np.int32), 80)

    assert CAPACITY / 4 < await allocated(fill) < SLACK * CAPACITY
    assert conversations._attempts.currsize <= CAPACITY


@pytest.mark.parametrize("size", [100, 5_000], ids=["short", "long"])
async def test_answers_for_retries(size: int) -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"%s" % n, b"%s" % v) for n, v in HEADERS],
            }
        )
        await send({"type": "http.response.body", "body": bytes(size), "more_body": False})

    async def receive_body() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    async def ignore(message: Message) -> None:
        """Take a message of the answer."""

    cache, body = RetryCache(answer, max_bytes=CAPACITY), b""

    async def fill() -> None:
        nonlocal body
        for number in range(MORE * CAPACITY // (5_000 + size)):
            body = json.dumps({"messages": [], "seed": number}).encode()
            token = SCOPE.set(AttemptScope(f"ro-{number // 50}", "at-1"))
            scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": []}
            await cache(scope, receive_body, ignore)
            SCOPE.reset(token)

    assert CAPACITY / 4 < await allocated(fill) < SLACK * CAPACITY


async def test_earlier_responses() -> None:
    history = ResponseHistory(CAPACITY)

    async def fill() -> None:
        for number in range(MORE * CAPACITY // 1_500):
            turn = [{"role": role, "content": f"{role} {number} " * 9} for role in ("user", "assistant")]
            history.remember(None, f"resp_{number}", turn)
            history.remember_items(None, [{"id": f"msg_{number}.0", "content": [{"text": "a" * number}]}])

    assert CAPACITY / 4 < await allocated(fill) < 2 * SLACK * CAPACITY


@pytest.mark.slow
async def test_loads_of_conversations_from_the_store() -> None:
    async def history(rollout_id: str, attempt_id: str) -> list[Any]:
        return []

    loader = ConversationLoader(Conversations(TOKENIZERS["chatml"], CAPACITY), history)

    async def fill() -> None:
        for number in range(12_000):
            await loader.load(AttemptScope("ro-1", "at-1"), number.to_bytes(16))
            await asyncio.sleep(0)

    assert await allocated(fill) < 4 * 2**20
