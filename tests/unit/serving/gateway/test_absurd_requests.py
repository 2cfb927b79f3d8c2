"""Invalid requests on every route of a replica with a real engine.

Each is answered in time, as an error of the client, in the shape of its dialect.
"""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_helpers import CHAT, KEY, MINE, POSTED, is_refusal, within

import raylight
from raylight.serving.capture.recorder import Recorder
from raylight.serving.gateway.gateway import build_gateway
from raylight.types import CallKey

MODEL = Path(raylight.__file__).parent / "quickstart" / "model"
DEADLINE_S = 30.0
"""Longest time of one request, in seconds; 64 tokens of this model take well under a second."""
HIDDEN_FAILURES = ('"server_error"', '"api_error"', '"code": 500')
"""Text of a stream's event if the server failed while streaming."""


class Site:
    """A replica with the transformers engine, whose store accepts everything, in one event loop."""

    def __init__(self) -> None:
        import torch

        from raylight.engines.transformers.engine import TransformersEngine

        torch.set_num_threads(1)
        self.engine = TransformersEngine(str(MODEL), "policy", slots=16, max_waiting=1000, max_model_len=64)
        self.runner = asyncio.Runner()
        self.opened: list[CallKey] = []
        self.closed: list[CallKey] = []
        self.app = self.runner.run(self._build())

    async def _build(self) -> Any:
        return build_gateway(await self.engine.app(), self.engine, "run-secret", Recorder(self._store), None)

    async def _store(self, opened: list[Any], closed: list[Any]) -> list[CallKey]:
        self.opened += [key for key, _ in opened]
        self.closed += [key for key, _, _ in closed]
        return []

    def ask(self, path: str, content: bytes, method: str = "POST", **headers: str) -> httpx.Response:
        return self.runner.run(self._ask(path, content, method, headers))

    async def _ask(self, path: str, content: bytes, method: str, headers: dict[str, str]) -> httpx.Response:
        given = {"authorization": f"Bearer {KEY}", "content-type": "application/json"} | headers
        transport = httpx.ASGITransport(app=self.app)
        async with (
            httpx.AsyncClient(transport=transport, base_url="http://replica") as client,
            within(DEADLINE_S),
        ):
            return await client.request(method, MINE + path, content=content, headers=given)

    def check(self, path: str, body: Any, **headers: str) -> httpx.Response:
        """Send a request, and check that its answer is not a failure of the server."""
        answer = self.ask(path, json.dumps(body).encode(), **headers)
        told = f"{answer.status_code} {answer.text[:1000]} to {json.dumps(body)[:1000]}"
        assert answer.status_code < 500, told
        assert answer.status_code == 200 or is_refusal(answer, path), told
        assert not any(failure in answer.text for failure in HIDDEN_FAILURES), told
        return answer

    def close(self) -> None:
        self.runner.close()
        self.engine.close()


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    site = Site()
    yield site
    site.close()


HI = [{"role": "user", "content": "hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer"}},
    "required": ["x"],
    "additionalProperties": False,
}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA}
CALLED = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
SAMPLING = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1, "presence_penalty": 0.1}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}], "parallel_tool_calls": True}
TOOL_TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": None, "tool_calls": CALLED},
    {"role": "tool", "tool_call_id": "c1", "content": "1"},
]
TOOL_ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "1"},
]
TOOL_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "a"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "f", "input": {"x": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "1"}]},
]


def asked(**fields: Any) -> dict[str, Any]:
    return {"model": "policy"} | fields


def schema(given: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": given}}}


CHAT_BODIES = [
    asked(messages=HI, max_tokens=3, **SAMPLING, n=2, stop=["x"], logprobs=True, top_logprobs=2, user="u")
    | {"logit_bias": {"5": 1.0}},
    asked(messages=HI, max_completion_tokens=3, stream=True, tool_choice="auto", **TOOLS)
    | {"stream_options": {"include_usage": True}},
    asked(messages=TOOL_TURNS, max_tokens=3, **schema(SCHEMA)),
]
COMPLETION_BODIES = [
    asked(prompt="hi", max_tokens=3, n=2, temperature=0, logprobs=2, echo=False, seed=1),
    asked(prompt=["a", "b"], max_tokens=3, stream=True, stop="x"),
    asked(prompt=[[1, 2], [3]], max_tokens=3),
]
RESPONSE_BODIES = [
    asked(input="hi", max_output_tokens=3, temperature=0.5, store=False, instructions="i"),
    asked(input=TOOL_ITEMS, max_output_tokens=3, stream=True, tool_choice="auto")
    | {"tools": [{"type": "function", **FUNCTION}]}
    | {"text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}},
]
MESSAGES_BODIES = [
    asked(messages=HI, max_tokens=3, temperature=0.5, system="s", stop_sequences=["x"], top_k=5)
    | {"metadata": {"user_id": "u"}},
    asked(messages=TOOL_BLOCKS, max_tokens=3, stream=True, tool_choice={"type": "auto"})
    | {"tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}]}
    | {"system": [{"type": "text", "text": "s"}]},
]
BODIES: dict[str, list[dict[str, Any]]] = {
    CHAT: CHAT_BODIES,
    "/v1/completions": COMPLETION_BODIES,
    "/v1/responses": RESPONSE_BODIES,
    "/v1/messages": MESSAGES_BODIES,
    "/v1/messages/count_tokens": [asked(messages=HI, system="s")],
    "/tokenize": [asked(prompt="hi", add_special_tokens=True), asked(messages=HI)],
    "/detokenize": [asked(tokens=[1, 2, 3])],
}
BODIES |= {f"/v1{path}": BODIES[path] for path in ("/tokenize", "/detokenize")}

CONTENTS: list[Any] = ["x" * 10**6, [{"type": "image_url"}]]
NEGATIVE = {"type": "object", "maxProperties": -1}
DEEP: Any = []
for _ in range(180):
    DEEP = [DEEP]


@pytest.mark.parametrize("path", POSTED)
def test_the_bodies_are_sound(site: Site, path: str) -> None:
    """The other requests must get past the first check. The engine may reject what it cannot do."""
    assert 200 in {site.check(path, body).status_code for body in BODIES[path]}


ABSURD_VALUES: dict[str, list[Any]] = {
    "max_tokens": [-1, 0, 2**63, 1.5, "3", 10**9],
    "max_output_tokens": [-1],
    "n": [10**9, 0, -1, 1.5, 2**63],
    "temperature": [-1, 1e308, 1e-308, "hot", float("nan")],
    "top_p": [0, 2],
    "top_k": [-5, 2**62],
    "seed": [2**63 - 1, -(2**63), 1.5],
    "stop": ["", [""], ["x"] * 10_000, "\x00"],
    "logprobs": [10**6],
    "best_of": [10**9],
    "messages": [[], "hi", [{}], HI * 10_000, *([{"role": "user", "content": x}] for x in CONTENTS)],
    "prompt": [[], [[]], [10**9], [-1], ["x"] * 10_000, "x" * 10**6, [1, "a"], [[1], "a"]],
    "tokens": [[10**9], [-1], [], [2**63]],
    "model": ["other", "", "../../etc/passwd", 7],
    "stream": ["yes"],
    "logit_bias": [{"x": 1}, {"999999": 1}, {"-1": 1}, {"5": 1e300}],
    "tools": [[{"type": "odd"}], [{"type": "function", "function": {"name": "f", "parameters": NEGATIVE}}]],
    "tool_choice": ["required", {"type": "function", "function": {"name": "g"}}],
    "kv_transfer_params": [{"prompt_token_ids": [1, 2]}],
    "chat_template": ["{% for i in range(10**9) %}x{% endfor %}"],
    "chat_template_kwargs": [{"x": DEEP}],
    "add_generation_prompt": ["x"],
    "use_beam_search": [True],
    "input": [[], [{}], {"a": DEEP}],
    "previous_response_id": ["resp_1", "\x00"],
    "background": [True],
    "thinking": [{"type": "enabled", "budget_tokens": -1}],
    "stop_sequences": [[""]],
    "system": [DEEP],
    "truncation": ["odd"],
    "min_tokens": [10**9],
    "repetition_penalty": [1e-300, 10],
    "min_p": [5],
}
ABSURD = [
    *({field: value} for field, values in ABSURD_VALUES.items() for value in values),
    {"top_logprobs": 10**6, "logprobs": True},
    {"stream": True, "n": 3},
    {"ignore_eos": True, "max_tokens": None},
    {"frequency_penalty": 2, "presence_penalty": -2},
    {"messages": [{"role": "\x00", "content": "x"}]},
    *map(schema, [{"type": "odd"}, {"$ref": "#"}, {"$ref": "http://example.com/x"}, {"pattern": "(((("}]),
    schema({"maxProperties": -1}),
]


@pytest.mark.parametrize("more", ABSURD, ids=lambda more: json.dumps(more)[:40])
def test_absurd_parameters_are_no_failure_of_the_server(site: Site, more: dict[str, Any]) -> None:
    for path in POSTED[:-2]:
        site.check(path, BODIES[path][0] | more)
    if more.keys() & {"messages", "stream", "tools", "response_format"}:
        for path in (CHAT, "/v1/responses", "/v1/messages"):
            site.check(path, BODIES[path][1] | more)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-raylight-token-in": "perhaps"},
        {"x-stainless-retry-count": "-1"},
        {"x-stainless-retry-count": "9" * 500},
        {"x-stainless-retry-count": "1"},
        {"x-request-id": "x" * 5000},
        {"x-request-id": ""},
        {"accept": "text/html"},
        {"accept-encoding": "odd"},
        {"anthropic-version": "1900-01-01"},
        {"content-length": "0"},
    ],
)
@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_odd_headers_are_no_failure_of_the_server(site: Site, path: str, headers: dict[str, str]) -> None:
    for body in BODIES[path]:
        site.check(path, body, **headers)


def test_every_call_that_was_opened_is_closed(site: Site) -> None:
    """The last test: after all failures before, no record waits for the store."""
    site.check(CHAT, BODIES[CHAT][0])

    async def until_closed() -> None:
        async with within():
            while len(site.closed) < len(site.opened):  # noqa: ASYNC110
                await asyncio.sleep(0)

    site.runner.run(until_closed())
    assert sorted(map(str, site.opened)) == sorted(map(str, site.closed))
