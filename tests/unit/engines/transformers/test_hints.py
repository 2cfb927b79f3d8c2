"""Hints of every dialect, up to the prompt that the chat template makes of them."""

from typing import Any

import openai
import pytest
from app_clients import anthropic_client, openai_client
from transformers_helpers import MakeEngine, restyle

from raylight.serving.gateway.gateway import build_gateway

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}"
    "{% if enable_thinking is defined %} think={{ enable_thinking }}{% endif %}"
    "{% if reasoning_effort is defined %} effort={{ reasoning_effort }}{% endif %}"
    "{% if verbosity is defined %} verbosity={{ verbosity }}{% endif %}"
)
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("dialect", "fields", "prompt"),
    [
        ("chat", {}, "hi"),
        ("chat", {"reasoning_effort": "low", "verbosity": "high"}, "hi effort=low verbosity=high"),
        ("chat", {"reasoning": {"effort": "none"}}, "hi think=False"),
        ("chat", {"enable_thinking": False}, "hi think=False"),
        ("chat", {"chat_template_kwargs": {"enable_thinking": True}}, "hi think=True"),
        (
            "responses",
            {"reasoning": {"effort": "high"}, "text": {"verbosity": "low"}},
            "hi effort=high verbosity=low",
        ),
        ("messages", {"thinking": {"type": "disabled"}}, "hi think=False"),
        (
            "messages",
            {"thinking": {"type": "enabled", "budget_tokens": 9}, "output_config": {"effort": "max"}},
            "hi think=True effort=max",
        ),
    ],
)
async def test_a_hint_that_the_template_reads_is_in_the_prompt(
    make_engine: MakeEngine, dialect: str, fields: dict[str, Any], prompt: str
) -> None:
    engine = make_engine()
    restyle(engine, TEMPLATE)
    app = build_gateway(await engine.app(), engine, None, None, None)
    if dialect == "messages":
        async with anthropic_client(app, "http://localhost") as client:
            message = await client.messages.create(
                model="policy", messages=HI, max_tokens=1, extra_body=fields
            )
            tokens = message.usage.input_tokens
    else:
        async with openai_client(app, "http://localhost/v1") as client:
            tokens = await prompt_tokens(client, dialect, fields)
    assert tokens == len(engine.tokenizer.encode(prompt, add_special_tokens=False))


async def prompt_tokens(client: openai.AsyncOpenAI, dialect: str, fields: dict[str, Any]) -> int:
    if dialect == "responses":
        answer = await client.responses.create(
            model="policy", input=HI, max_output_tokens=1, extra_body=fields
        )
        return answer.usage.input_tokens
    chat = await client.chat.completions.create(model="policy", messages=HI, max_tokens=1, extra_body=fields)
    return chat.usage.prompt_tokens
