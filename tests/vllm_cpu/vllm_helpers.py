"""What the tests of vLLM share."""

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
    """Log-probabilities of the tokens of `output`, by plain transformers."""
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(output)[:, None])[:, 0]


def difference(model: Any, sample: Any, temperature: float = 1.0) -> torch.Tensor:
    """Of a sample's log-probabilities from those of plain transformers, token by token."""
    assert len(sample.output_ids) == len(sample.logprobs) == len(sample.weight_versions) > 0
    return (
        torch.tensor(sample.logprobs)
        - expected_logprobs(model, sample.prompt_ids, sample.output_ids, temperature)
    ).abs()


def change(model: Any, seed: int, scale: float = 0.1) -> dict[str, torch.Tensor]:
    """Other weights of the same model, as a learner exports them: of tied layers only the first."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * scale)
    state = dict(model.state_dict())
    state.pop("lm_head.weight", None)
    return state


async def until(holds: Any) -> None:
    """Wait for what no event tells of, such as the tokens of another process."""
    async with within():
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def ask(bench: Any, tokens: int, model: str = "policy", **settings: Any) -> asyncio.Task[Any]:
    """A request for exactly so many tokens."""
    extra = {"ignore_eos": True}
    create = bench.openai.chat.completions.create
    return asyncio.create_task(
        create(model=model, messages=HI, max_tokens=tokens, extra_body=extra, **settings)
    )


async def in_flight(
    bench: Any, requests: int, tokens: int, model: str = "policy", **settings: Any
) -> tuple[list[asyncio.Task[Any]], list[Any]]:
    """Requests that have begun, and their exchanges."""
    before = len(bench.exchanges)
    tasks = [ask(bench, tokens, model, **settings) for _ in range(requests)]
    await until(lambda: len(bench.exchanges) == before + requests)
    exchanges = bench.exchanges[before:]
    await until(lambda: all(e.samples and len(e.samples[0].output_ids) > 3 for e in exchanges))
    return tasks, exchanges
