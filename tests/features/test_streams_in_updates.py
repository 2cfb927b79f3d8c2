"""Streams of requests that wait while an engine's weights change, in each dialect and on each engine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from engine_server import MODEL, SECRET, EngineServer

from raylight.agent.attempt_keys import attempt_key, attempt_path

READ_TIMEOUT_S = 60
MESSAGES = [{"role": "user", "content": "hi"}]
COMMENT = ": keep-alive"
REQUESTS = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 20}, "data: [DONE]"),
    "messages": ("/v1/messages", {"messages": MESSAGES, "max_tokens": 20}, "event: message_stop"),
    "responses": (
        "/v1/responses",
        {"input": "hi", "max_output_tokens": 20},
        ("event: response.completed", "event: response.incomplete"),
    ),
}
"""Path, body and last event of a request in each dialect; two if it names the limit of tokens."""
PINGS = {"messages": "event: ping", "responses": "event: keepalive"}
"""Keep-alive events; other dialects send comments."""


@contextmanager
def stream(server: EngineServer, path: str, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """Send a request of an attempt; yields the lines of its answer."""
    rollout = server.call(server.store.start_rollout("task"))
    assert rollout.attempt is not None
    ids = rollout.rollout_id, rollout.attempt.attempt_id
    headers = {"Authorization": f"Bearer {attempt_key(SECRET, *ids)}"}
    fields = {"model": MODEL, "stream": True, **body}
    url = f"http://127.0.0.1:{server.port}{attempt_path(*ids)}{path}"
    with httpx.stream("POST", url, json=fields, headers=headers, timeout=READ_TIMEOUT_S) as answer:
        assert answer.status_code == 200, answer.read()
        yield answer.iter_lines()


def read_until(lines: Iterator[str], start: str | tuple[str, ...], count: int = 1) -> None:
    """Read until the line of a number that begins with a text, or with one of several."""
    for line in lines:
        count -= line.startswith(start)
        if count == 0:
            return
    pytest.fail(f"the stream has ended without a line that begins with {start!r}")


@contextmanager
def updating(server: EngineServer) -> Iterator[None]:
    """Pause the engine for an update, which is then given up."""
    server.call(server.engine.start_weight_update())
    try:
        yield
    finally:
        server.call(server.engine.abort_weight_update())


@pytest.fixture
def updated(server: EngineServer) -> EngineServer:
    if server.kind == "upstream":
        pytest.skip("an upstream model has no updates")
    return server


@pytest.mark.parametrize("dialect", REQUESTS)
def test_a_stream_that_begins_in_an_update_is_kept_alive(updated: EngineServer, dialect: str) -> None:
    path, body, end = REQUESTS[dialect]
    with ExitStack() as stack:
        with updating(updated):
            lines = stack.enter_context(stream(updated, path, body))
            read_until(lines, PINGS.get(dialect, COMMENT), 2)
        read_until(lines, end)


def test_a_stream_that_an_update_interrupts_is_kept_alive(updated: EngineServer) -> None:
    path, body, end = REQUESTS["chat"]
    with stream(updated, path, body | {"max_tokens": 400, "ignore_eos": True}) as lines:
        read_until(lines, "data: {", 3)
        with updating(updated):
            read_until(lines, COMMENT, 2)
        read_until(lines, end)
