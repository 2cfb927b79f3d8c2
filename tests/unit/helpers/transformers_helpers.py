"""Helpers for tests of the transformers engine: a brake, scripted answers, a client."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import openai
import pytest
import torch
from answer_rows import answer_logprobs
from app_clients import openai_client
from transformers import AutoModelForCausalLM
from unit_helpers import within

from raylight.engines.capture_context import CURRENT, AttemptScope, CaptureContext, Sample
from raylight.engines.transformers.engine import TransformersEngine
from raylight.engines.transformers.message import find_style
from raylight.engines.transformers.sampling import SamplingParams
from raylight.engines.transformers.text import Vocabulary

MakeEngine = Callable[..., TransformersEngine]
GREEDY = SamplingParams(12, temperature=0.0)
HERMES = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": {{ c.function.name | tojson }}, '
    '"arguments": {{ c.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = HERMES + "{# <think> #}"


@torch.inference_mode()
def logprobs_of(module: Any, prompt: list[int], output: list[int], temperature: float = 1.0) -> list[float]:
    return answer_logprobs(module, prompt, output, temperature).tolist()


async def generate_all(
    engine: TransformersEngine, requests: list[tuple[list[int], SamplingParams]]
) -> list[Sample]:
    async with within(30):
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt, params in requests))


async def check_greedy(
    engine: TransformersEngine, module: Any, prompt: list[int], adapter: str | None = None
) -> None:
    """Check that greedy tokens and their log-probs match a plain module's."""
    async with within(30):
        sampled = await engine.generate(prompt, GREEDY, adapter)
    assert sampled.logprobs == pytest.approx(logprobs_of(module, prompt, sampled.output_ids), abs=1e-4)
    with torch.inference_mode():
        best = (
            module(torch.tensor([prompt + sampled.output_ids]))
            .logits[0, len(prompt) - 1 : -1]
            .argmax(-1)
            .tolist()
        )
    assert sampled.output_ids == best


def other_weights(path: str, seed: int = 9) -> tuple[dict[str, Any], Any]:
    """Return weights that differ from the model's, and a plain module with them."""
    module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}, module


class Brake:
    """Blocks the engine's thread in its nth forward pass until `release`."""

    def __init__(self, engine: TransformersEngine, at: int) -> None:
        self.passes, self._at = 0, at
        self._loop, self.reached, self._go = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        engine._decoder.module.register_forward_hook(self._count)

    def _count(self, *args: Any) -> None:
        self.passes += 1
        if self.passes == self._at:
            self._loop.call_soon_threadsafe(self.reached.set)
            self._go.wait(10)

    def release(self) -> None:
        self._go.set()


def script(engine: TransformersEngine, *texts: str) -> None:
    """Make the engine's model sample fixed texts, one per choice (the last for all others)."""
    tokenizer, decoder = engine.tokenizer, engine._decoder
    answers = [[*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id] for text in texts]

    def scripted(compute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def fixed_logits(*given: Any) -> torch.Tensor:
            logits = compute(*given)
            for row, sequence in enumerate(given[0] if given else decoder.active):
                answer = answers[min(sequence.sample.index, len(answers) - 1)]
                logits[row] = -10.0
                logits[row, answer[min(len(sequence.sample.output_ids), len(answer) - 1)]] = 20.0
            return logits

        return fixed_logits

    decoder.prefill = scripted(decoder.prefill)  # type: ignore[method-assign]
    decoder.decode = scripted(decoder.decode)  # type: ignore[method-assign]


def restyle(engine: TransformersEngine, template: str, **how: Any) -> None:
    """Replace the engine's chat template."""
    engine.tokenizer.chat_template = template
    engine.style = find_style(engine.tokenizer, how.get("tool_parser", "auto"), how.get("reasoning", "auto"))
    engine.vocabulary = Vocabulary(engine.tokenizer, engine.style.texts)


async def client_of(engine: TransformersEngine) -> openai.AsyncOpenAI:
    """Return the real SDK's client of the engine's application."""
    return openai_client(await engine.app())


def open_context() -> CaptureContext:
    """Set a capture context for the requests of the running test."""
    context = CaptureContext(AttemptScope("ro-1", "at-1"), "chat", {}, 0.0, [])
    CURRENT.set(context)
    return context
