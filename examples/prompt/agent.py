"""The agent: it asks for a sum in the words of a prompt template, with the OpenAI client."""

from __future__ import annotations

from typing import Any

import raylight as rl

FIRST_PROMPT = rl.PromptTemplate(template="Could you please tell me what {a} plus {b} makes?")


@rl.rollout
async def adder(task: dict[str, Any], llm: rl.LLM, prompt_template: rl.PromptTemplate) -> float:
    """Return 1 if the answer is the sum and nothing else, and 0 otherwise."""
    reply = await llm.client().chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": prompt_template.format(**task)}],
        temperature=1.0,
        max_tokens=64,
    )
    return float((reply.choices[0].message.content or "").strip() == str(task["a"] + task["b"]))
