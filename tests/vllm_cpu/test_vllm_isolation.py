"""Isolation of requests in vLLM: no request harms another of its batch, or the engine's process."""

import asyncio
import json
import random
from typing import Any

import httpx
import pytest
from vllm_helpers import HI, within

from raylight.serving.gateway.gateway import build_gateway

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]
VALID: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 1, "n": 2},
    {"seed": -(2**63), "temperature": 2, "top_p": 1e-300},
    {"seed": 2, "top_k": 2**31 - 1, "min_p": 1},
    {"seed": 3, "logprobs": True, "top_logprobs": 3, "stop": ["a" * 60] * 4},
    {"seed": 4, "logit_bias": {str(token): 100 for token in range(300)}},
    {"seed": 5, "repetition_penalty": 0.01, "presence_penalty": 2, "frequency_penalty": -2},
    {"seed": 6, "min_tokens": 5, "stop_token_ids": [0, 319]},
    {"seed": 7, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    {"seed": 8, "bad_words": ["a", "b"], "allowed_token_ids": list(range(100))},
]
EXTREMES: list[Any] = [
    2**63,
    2**64 - 1,
    -(2**63),
    2**31,
    1e308,
    -1e308,
    1e-320,
    "3",
    [],
    {},
    [-1],
    [2**31],
    [320],
]
FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "n", "max_tokens", "min_tokens", "seed", "top_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty", "logit_bias", "stop"),
    *("stop_token_ids", "allowed_token_ids", "logprob_token_ids", "bad_words", "truncate_prompt_tokens"),
    *("priority", "prompt_logprobs", "stream_interval", "repetition_detection", "structured_outputs"),
    *("routed_experts_prompt_start", "thinking_token_budget", "vllm_xargs", "cache_salt", "request_id"),
)
SCHEMAS: list[Any] = [{"$ref": "#"}, {"type": "string", "pattern": "a{0,10000}"}, {"anyOf": [False]}]
INVALID: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}}
    for schema in SCHEMAS
] + [{"structured_outputs": {"regex": "(a{1,1000}){1,1000}"}}, {"structured_outputs": {"json": "{"}}]


async def answer_of(client: httpx.AsyncClient, fields: dict[str, Any]) -> tuple[int, Any]:
    body = {"model": "policy", "messages": HI, "max_tokens": 10} | fields
    answer = await client.post("/v1/chat/completions", content=json.dumps(body).encode())
    choices = answer.json().get("choices") or []
    return answer.status_code, [choice["message"]["content"] for choice in choices] or answer.text


async def test_random_requests_in_one_batch_get_the_answers_that_they_get_alone(bench: Any) -> None:
    app = build_gateway(bench.bare, bench.engine, None, None, None)
    transport, draw = httpx.ASGITransport(app, raise_app_exceptions=False), random.Random(3)
    headers = {"content-type": "application/json"}
    async with (
        httpx.AsyncClient(
            transport=transport, base_url="http://localhost", headers=headers, timeout=60
        ) as client,
        within(240),
    ):
        alone = [await answer_of(client, fields) for fields in VALID]
        assert {status for status, _ in alone} == {200}, alone
        for _ in range(15):
            good = [draw.randrange(len(VALID)) for _ in range(6)]
            bad = [{draw.choice(FIELDS): draw.choice(EXTREMES)} for _ in range(8)] + [draw.choice(INVALID)]
            requests = [(index, VALID[index]) for index in good] + [(None, fields) for fields in bad]
            draw.shuffle(requests)
            answers = await asyncio.gather(*(answer_of(client, fields) for _, fields in requests))
            for (index, fields), answer in zip(requests, answers, strict=True):
                assert answer[0] < 500, (fields, answer)
                if index is not None:
                    assert answer == alone[index], fields
        await bench.engine.check_health()
