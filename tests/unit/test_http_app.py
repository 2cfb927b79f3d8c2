"""The HTTP face: keys, scopes, errors in OpenAI's shape, and no body that gets a 5xx."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit_helpers import FakeEngine, within

from raylight.agent.keys import attempt_path, scoped_key
from raylight.serving.app import build_app
from raylight.serving.capture import CapturingEngine, Recorder
from raylight.serving.engine import RequestError

SECRET = "run-secret"
CHAT = "/v1/chat/completions"
MINE = attempt_path("ro-1", "at-1")
BODY = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


class Replica:
    """An application around a fake engine, and what its store was told."""

    def __init__(self, answer: str = "hello") -> None:
        self.engine = FakeEngine(answer)
        self.opened: list[Any] = []
        self.app = build_app(CapturingEngine(self.engine, Recorder(self.sink)), SECRET, self.spans)
        transport = httpx.ASGITransport(app=self.app, raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://replica")

    async def sink(self, opened: list[Any], closed: list[Any]) -> None:
        self.opened += [key for key, _ in opened]

    async def spans(self, spans: list[Any]) -> None:
        """Nobody sends any."""

    async def post(self, path: str = MINE + CHAT, key: str | None = None, **how: Any) -> httpx.Response:
        key = scoped_key(SECRET, "ro-1", "at-1") if key is None else key
        how = how or {"json": BODY}
        async with within():
            return await self.client.post(path, headers={"authorization": f"Bearer {key}"}, **how)


async def test_a_call_in_an_attempts_scope_is_answered_and_recorded_for_it() -> None:
    replica = Replica()
    answer = await replica.post()
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"] == "hello"
    assert [(key.rollout_id, key.attempt_id) for key in replica.opened] == [("ro-1", "at-1")]


async def test_a_route_prefix_before_the_attempt_is_kept() -> None:
    replica = Replica()
    answer = await replica.post("/some-run" + MINE + CHAT)
    assert answer.status_code == 404  # not mounted there, but the key was accepted


async def test_the_runs_secret_opens_the_plain_routes_without_recording() -> None:
    replica = Replica()
    assert (await replica.post(CHAT, SECRET)).status_code == 200
    assert replica.opened == []


@pytest.mark.parametrize(("path", "key"), [
    (MINE + CHAT, "wrong"), (MINE + CHAT, ""), (MINE + CHAT, SECRET), (MINE + CHAT, scoped_key(SECRET, "ro-1", "at-2")),
    (MINE + CHAT, scoped_key(SECRET, "ro-2", "at-1")), (MINE + CHAT, scoped_key("other", "ro-1", "at-1")), (CHAT, "wrong"),
    (CHAT, scoped_key(SECRET, "ro-1", "at-1")), ("/v1/models", "wrong"), ("/nowhere", "wrong"), (MINE + "/v1/health", "wrong"),
    (CHAT, "schlüssel".encode("latin-1").decode("latin-1")),
])  # fmt: skip
async def test_a_key_that_does_not_fit_opens_nothing(path: str, key: str) -> None:
    replica = Replica()
    async with within():
        answer = await replica.client.post(path, headers={"authorization": f"Bearer {key}".encode("latin-1")}, json=BODY)
    assert answer.status_code == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert replica.engine.calls == []


async def test_without_any_key_only_health_is_open() -> None:
    replica = Replica()
    assert (await replica.client.get("/health")).json() == {"status": "ok", "model": "policy"}
    assert (await replica.client.get("/v1/models")).status_code == 401


async def test_the_model_is_listed() -> None:
    headers = {"authorization": f"Bearer {scoped_key(SECRET, 'ro-1', 'at-1')}"}
    answer = await Replica().client.get(MINE + "/v1/models", headers=headers)
    assert [model["id"] for model in answer.json()["data"]] == ["policy"]


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"{'a': 1}", b'{"a": 1} x', b"[" * 100_000, b"1" * 5000])
async def test_a_body_that_is_no_json_is_a_bad_request(content: bytes) -> None:
    answer = await Replica().post(content=content)
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_an_unsupported_field_is_a_bad_request_that_names_it() -> None:
    answer = await Replica().post(json={**BODY, "tools": []})
    assert answer.status_code == 400
    assert "tools" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", CHAT, 405), ("POST", "/v1/models", 405), ("POST", "/v1/embeddings", 404), ("GET", "/", 404), ("POST", "/v1", 404),
    ("POST", CHAT + "/", 404), ("GET", "/v1/traces", 405), ("GET", "/nowhere/health", 404),
])  # fmt: skip
async def test_an_unknown_route_or_method_is_said_so(method: str, path: str, status: int) -> None:
    answer = await Replica().client.request(method, path, headers={"authorization": f"Bearer {SECRET}"})
    assert answer.status_code == status


async def test_an_engines_refusal_keeps_its_status() -> None:
    replica = Replica()
    replica.engine.error = RequestError("full", 503, "overloaded_error")
    answer = await replica.post()
    assert answer.status_code == 503
    assert answer.json()["error"] == {"message": "full", "type": "overloaded_error", "param": None, "code": None}


async def test_concurrent_calls_keep_their_scopes_apart() -> None:
    replica = Replica()
    replica.engine.gate.clear()
    names = [(f"ro-{i}", f"at-{i}") for i in range(10)]
    calls = [asyncio.create_task(replica.post(attempt_path(*n) + CHAT, scoped_key(SECRET, *n))) for n in names]
    plain = asyncio.create_task(replica.post(CHAT, SECRET))
    replica.engine.gate.set()
    assert {answer.status_code for answer in await asyncio.gather(*calls, plain)} == {200}
    assert sorted((key.rollout_id, key.attempt_id) for key in replica.opened) == sorted(names)


async def test_a_client_that_goes_away_cancels_the_sampling() -> None:
    replica = Replica()
    replica.engine.gate.clear()
    messages = [{"type": "http.request", "body": json.dumps(BODY).encode(), "more_body": False}]
    sent = []

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop(0)
        await replica.engine.called.wait()
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "root_path": "", "query_string": b"",
        "headers": [(b"authorization", f"Bearer {SECRET}".encode())], "http_version": "1.1", "scheme": "http",
        "server": ("replica", 80), "client": ("agent", 1),
    }  # fmt: skip
    async with within():
        await replica.app(scope, receive, send)
    assert replica.engine.cancelled == 1
    assert sent[0]["status"] == 499


async def test_a_request_that_is_cancelled_cancels_the_sampling() -> None:
    replica = Replica()
    replica.engine.gate.clear()
    asking = asyncio.create_task(replica.post())
    async with within():
        await replica.engine.called.wait()
        asking.cancel()
        await asyncio.wait([asking])
        for _ in range(20):
            await asyncio.sleep(0)
    assert replica.engine.cancelled == 1


# no body gets a 5xx

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
FIELDS = st.sampled_from([
    "temperature", "top_p", "top_k", "max_tokens", "max_completion_tokens", "stop", "seed", "n", "logprobs", "stream", "user",
    "model", "messages", "tools", "\ud800",
])  # fmt: skip
BODIES = st.one_of(
    JSON,
    st.dictionaries(FIELDS, JSON, max_size=4),
    st.builds(lambda more: {**BODY, **more}, st.dictionaries(FIELDS, JSON, max_size=3)),
    st.builds(lambda m: {**BODY, "messages": m}, st.lists(st.fixed_dictionaries({"role": JSON, "content": JSON}), max_size=2)),
)


def status_of(content: bytes) -> int:
    async def ask() -> int:
        return (await Replica().post(content=content)).status_code

    return asyncio.run(ask())


@given(BODIES)
@settings(max_examples=150, deadline=None)
def test_no_json_body_is_a_failure_of_the_server(value: Any) -> None:
    assert status_of(json.dumps(value).encode()) in (200, 400, 404)


@given(st.binary(max_size=40))
@settings(max_examples=50, deadline=None)
def test_no_bytes_are_a_failure_of_the_server(content: bytes) -> None:
    assert status_of(content) == 400


@pytest.mark.parametrize("content", [b'{"\\ud800": 1}', b'{"model": "\\ud800", "messages": [{"role": "user", "content": "x"}]}'])
def test_half_a_character_is_a_fault_of_the_client(content: bytes) -> None:
    assert status_of(content) in (400, 404)


@pytest.mark.parametrize("seed", [0, -1, 2**63, 2**70, -(2**70)])
async def test_a_seed_of_any_size_is_used_or_refused(make_engine: Callable[..., Any], seed: int) -> None:
    """With the real engine, whose generators take 64 bits."""
    replica = Replica()
    replica.engine = make_engine(slots=2)
    replica.app = build_app(CapturingEngine(replica.engine, Recorder(replica.sink)), SECRET, replica.spans)
    transport = httpx.ASGITransport(app=replica.app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://replica") as replica.client:
        assert (await replica.post(json={**BODY, "seed": seed, "max_tokens": 2})).status_code in (200, 400)
