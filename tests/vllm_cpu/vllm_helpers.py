"""Helpers for the tests of vLLM."""

import asyncio
import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

import torch
from answer_rows import answer_logprobs
from programs import run_python

TOLERANCE = 1e-4
DEADLINE_S = 60.0
HI = [{"role": "user", "content": "hi"}]
PREFIX = [5 + i * 7 % 240 for i in range(300)]
"""A prompt of more than two blocks of the cache."""
expected_logprobs = torch.no_grad()(answer_logprobs)


def within(seconds: float = DEADLINE_S) -> Any:
    return asyncio.timeout(seconds)


def difference(model: Any, sample: Any, temperature: float = 1.0) -> torch.Tensor:
    """Return the differences of a sample's log-probs from plain transformers, per token."""
    assert len(sample.output_ids) == len(sample.logprobs) == len(sample.weight_versions) > 0
    expected = expected_logprobs(model, sample.prompt_ids, sample.output_ids, temperature)
    return (torch.tensor(sample.logprobs) - expected).abs()


def change(model: Any, seed: int, scale: float = 0.1) -> dict[str, torch.Tensor]:
    """Return other weights of the same model, as a learner sends them."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return dict(model.state_dict())


def run_program(name: str, *arguments: object, timeout_s: float = 880, **environment: str) -> Any:
    """Run a program of this folder."""
    program, paths = Path(__file__).parent / name, os.pathsep.join(sys.path)
    return run_python(program, *arguments, timeout_s=timeout_s, PYTHONPATH=paths, **environment)


async def until(holds: Any) -> None:
    """Poll a condition without an event, such as tokens of another process."""
    async with within():
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def cached_tokens(bench: Any, ids: list[int]) -> int:
    """Return the number of tokens of a prompt that the cache has."""
    from vllm.inputs import tokens_input
    from vllm.sampling_params import SamplingParams

    outputs = bench.engine._client.generate(
        tokens_input(ids), SamplingParams(max_tokens=1), f"cached-{uuid.uuid4().hex}"
    )
    return int([output async for output in outputs][-1].num_cached_tokens)


def ask(bench: Any, tokens: int, model: str = "policy", **settings: Any) -> asyncio.Task[Any]:
    """Send a request for exactly `tokens` tokens."""
    extra = {"ignore_eos": True}
    create = bench.openai.chat.completions.create
    return asyncio.create_task(
        create(model=model, messages=HI, max_tokens=tokens, extra_body=extra, **settings)
    )


async def in_flight(
    bench: Any, requests: int, tokens: int, model: str = "policy", **settings: Any
) -> tuple[list[asyncio.Task[Any]], list[Any]]:
    """Start requests, and return them with their capture contexts."""
    before = len(bench.contexts)
    tasks = [ask(bench, tokens, model, **settings) for _ in range(requests)]
    await until(lambda: len(bench.contexts) == before + requests)
    contexts = bench.contexts[before:]
    await until(lambda: all(e.samples and len(e.samples[0].output_ids) > 3 for e in contexts))
    return tasks, contexts


async def abandon(bench: Any, stream: bool = False) -> None:
    """Send a request for 400 tokens, and disconnect after some."""
    body = {"model": "policy", "messages": HI, "max_tokens": 400, "stream": stream, "ignore_eos": True}
    left = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if not sent:
            sent.append(True)
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None: ...

    sent: list[bool] = []
    path = "/v1/chat/completions"
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("engine", 80),
        "state": {},
    }
    before = len(bench.contexts)
    asked = asyncio.create_task(bench.captured(scope, receive, send))
    await until(
        lambda: (
            len(bench.contexts) > before and bool(bench.context.samples) and len(bench.sample.output_ids) > 5
        )
    )
    left.set()
    async with within():
        await asked
    await until(lambda: not bench.engine._client.output_processor.request_states)
