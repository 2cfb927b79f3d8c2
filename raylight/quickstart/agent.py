"""The quickstart's agent. Its only connection to raylight is the `llm` argument."""

from __future__ import annotations

import functools

from openai import AsyncOpenAI

import raylight as rl
from raylight.quickstart.additions import is_right, question

SAMPLING = {"temperature": 1.0, "max_tokens": 8}


@functools.cache
def client() -> AsyncOpenAI:
    """Return the process's one HTTP client; creating one takes 20 ms."""
    return AsyncOpenAI(base_url="http://unset", api_key="unset")


@rl.rollout
async def adder(task: dict, llm: rl.LLM) -> float:
    """Ask for a + b; return reward 1 for the right answer and 0 otherwise."""
    reply = (
        await client()
        .with_options(base_url=llm.endpoint, api_key=llm.api_key)
        .chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": question(task)}],
            **SAMPLING | llm.sampling_parameters,
        )
    )
    return 1.0 if is_right(task, reply.choices[0].message.content or "") else 0.0
