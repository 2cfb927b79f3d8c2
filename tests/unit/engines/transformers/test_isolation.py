"""Isolation of requests: an error of one never reaches another of its batch."""

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from transformers_helpers import Brake, MakeEngine
from unit_helpers import within

from raylight.engines.transformers import worker
from raylight.engines.transformers.engine import TransformersEngine
from raylight.engines.transformers.sampling import SamplingParams
from raylight.http.errors import RequestError
from raylight.serving.gateway.gateway import build_gateway

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
HI = [{"role": "user", "content": "hi"}]
VALID: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "n": 3},
    {"temperature": 1e-300, "top_k": 2**31 - 1},
    {"seed": 1},
    {"seed": -(2**63), "temperature": 10},
    {"seed": 2**63 - 4097, "n": 2, "top_p": 5e-324},
    {"seed": 3, "min_p": 1, "logprobs": True, "top_logprobs": 20},
    {"seed": 4, "top_k": 1, "stop": ["a" * 1000] * 64},
    {"seed": 5, "logit_bias": {str(token): 100 for token in range(300)}},
    {"seed": 6, "presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 10},
    {"seed": 7, "repetition_penalty": 0.01, "min_tokens": 3},
    {"seed": 8, "min_tokens": 12, "ignore_eos": True},
    {"seed": 9, "response_format": AS_JSON, "max_tokens": 60},
    {"seed": 10, "response_format": {"type": "json_object"}, "logit_bias": {"5": -100}},
    {"temperature": 0, "stream": True, "stream_options": {"include_usage": True}},
    {"temperature": 0, "return_token_ids": True, "messages": HI * 40},
]
INVALID_VALUES: list[Any] = [2**63, 2**64 - 1, -(2**63), 1e308, -1e308, 1e-320, "3", [], {}, True, -1, [[1]]]
INVALID_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "n", "max_tokens", "min_tokens", "seed", "top_logprobs"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop", "messages"),
    *("response_format", "tools", "stream_options", "kv_transfer_params", "chat_template_kwargs"),
)
INVALID: list[dict[str, Any]] = [
    {"logit_bias": {"320": 1}},
    {"logit_bias": {"5": -100, "319": 1e308}},
    {"kv_transfer_params": {"prompt_token_ids": [320]}},
    {"kv_transfer_params": {"prompt_token_ids": [-1]}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "what"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/no"}}}},
    {"messages": [{"role": "user", "content": "\ud800"}]},
    {"n": 200},
]
BROKEN = SamplingParams(12, temperature=0, top_k=7)
"""Parameters of the sequence that the tests break."""
SOUND = [SamplingParams(12, temperature=0), SamplingParams(12, seed=3), SamplingParams(12, seed=4, top_k=9)]


async def answer_of(client: httpx.AsyncClient, fields: dict[str, Any]) -> tuple[int, Any]:
    body = {"model": "policy", "messages": HI, "max_tokens": 12} | fields
    answer = await client.post("/v1/chat/completions", content=json.dumps(body).encode())
    if fields.get("stream") and answer.status_code == 200:
        events = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        pieces = [json.loads(event.removeprefix("data: "))["choices"] for event in events]
        return 200, "".join(piece[0]["delta"].get("content", "") for piece in pieces if piece)
    return answer.status_code, answer.json().get("choices") or answer.text


async def test_random_requests_in_one_batch_get_the_answers_that_they_get_alone(
    make_engine: MakeEngine,
) -> None:
    engine, draw = make_engine(slots=24), random.Random(5)
    app = build_gateway(await engine.app(), engine, None, None, None)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    headers = {"content-type": "application/json"}
    async with (
        httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as client,
        within(120),
    ):
        alone = [await answer_of(client, fields) for fields in VALID]
        refused = [(fields, answer) for fields, answer in zip(VALID, alone, strict=True) if answer[0] != 200]
        assert not refused
        for _ in range(5):
            good = [draw.randrange(len(VALID)) for _ in range(10)]
            bad = [draw.choice(INVALID) for _ in range(3)]
            bad += [{draw.choice(INVALID_FIELDS): draw.choice(INVALID_VALUES)} for _ in range(8)]
            requests = [(index, VALID[index]) for index in good] + [(None, fields) for fields in bad]
            draw.shuffle(requests)
            answers = await asyncio.gather(*(answer_of(client, fields) for _, fields in requests))
            for (index, fields), answer in zip(requests, answers, strict=True):
                assert answer[0] < 500, fields
                if index is not None:
                    assert answer == alone[index], fields


def raise_for_broken(function: Callable[..., Any], error: BaseException, has: Callable[..., bool]) -> Any:
    def checked(*given: Any) -> Any:
        if has(*given):
            raise error
        return function(*given)

    return checked


async def check_others(
    engine: TransformersEngine, alone: list[list[int]], prompt: tuple[int, ...] = (5, 6)
) -> None:
    """Check that the broken sequence alone fails, and that the engine keeps running.

    Args:
        prompt: prompt of the broken sequence.
    """
    prompts = [list(prompt), *([5, 6] for _ in SOUND)]
    async with within(30):
        found = await asyncio.gather(*map(engine.generate, prompts, [BROKEN, *SOUND]), return_exceptions=True)
        assert isinstance(found[0], RequestError)
        assert found[0].status == 500
        assert [sample.output_ids for sample in found[1:]] == alone  # type: ignore[union-attr]
        assert (await engine.generate([5, 6], SOUND[0])).output_ids == alone[0]
        await engine.check_health()


@pytest.fixture
def sound(make_engine: MakeEngine) -> Callable[..., Any]:
    """Returns an engine, and the answers to `SOUND`."""

    async def start() -> tuple[TransformersEngine, list[list[int]]]:
        engine = make_engine()
        async with within(30):
            return engine, [(await engine.generate([5, 6], params)).output_ids for params in SOUND]

    return start


async def test_parameters_that_break_the_sampler(sound: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, alone = await sound()
    broken = raise_for_broken(
        worker.distribution, OverflowError("no"), lambda _, params: any(p.top_k == 7 for p in params)
    )
    monkeypatch.setattr(worker, "distribution", broken)
    await check_others(engine, alone)


async def test_a_prompt_that_breaks_its_prefill(sound: Any) -> None:
    engine, alone = await sound()
    engine._decoder._forward = raise_for_broken(
        engine._decoder._forward, IndexError("no"), lambda rows, *_: any(s.params.top_k == 7 for s in rows)
    )
    await check_others(engine, alone, prompt=(7, 8))


class Panic(BaseException):
    """A panic of the tokenizer's Rust code, which is not an `Exception`."""


async def test_a_panic_after_a_token(sound: Any) -> None:
    engine, alone = await sound()
    engine._worker._is_complete = raise_for_broken(
        engine._worker._is_complete, Panic("no"), lambda sequence: sequence.params.top_k == 7
    )
    await check_others(engine, alone)


async def test_a_panic_of_a_whole_step_ends_its_requests_and_not_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine()
    brake, decode = Brake(engine, at=3), engine._decoder.decode
    engine._decoder.decode = raise_for_broken(decode, Panic("no"), lambda: True)  # type: ignore[method-assign]
    async with within(30):
        brake.release()
        with pytest.raises(RequestError, match="Panic"):
            await engine.generate([5, 6], SOUND[0])
        engine._decoder.decode = decode  # type: ignore[method-assign]
        await engine.generate([5, 6], SOUND[0])
        await engine.check_health()
