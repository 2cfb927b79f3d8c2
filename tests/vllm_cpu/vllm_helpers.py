"""Helpers for the tests of vLLM."""

from __future__ import annotations

import asyncio
from typing import Any

import torch

TOLERANCE = 1e-4
DEADLINE_S = 60.0
HI = [{"role": "user", "content": "hi"}]


def within(seconds: float = DEADLINE_S) -> Any:
    return asyncio.timeout(seconds)


def expected_logprobs(
    model: Any, prompt: list[int], output: list[int], temperature: float = 1.0
) -> torch.Tensor:
    """Return the log-probs of the tokens of `output` in plain transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *output]])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor([*output])[:, None])[:, 0]


def difference(model: Any, sample: Any, temperature: float = 1.0) -> torch.Tensor:
    """Return the differences of a sample's log-probs to those of plain transformers, per token."""
    assert len(sample.output_ids) == len(sample.logprobs) == len(sample.weight_versions) > 0
    return (
        torch.tensor(sample.logprobs)
        - expected_logprobs(model, sample.prompt_ids, sample.output_ids, temperature)
    ).abs()


def change(model: Any, seed: int, scale: float = 0.1) -> dict[str, torch.Tensor]:
    """Return other weights of the same model, as a learner sends them."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    return dict(model.state_dict())


async def until(holds: Any) -> None:
    """Poll a condition without an event, such as tokens of another process."""
    async with within():
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


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
