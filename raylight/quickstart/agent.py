"""The quickstart's agent. Its only connection to raylight is the `llm` argument."""

from __future__ import annotations

import raylight as rl
from raylight.quickstart.additions import is_right, question

SAMPLING = {"temperature": 1.0, "max_tokens": 8}


@rl.rollout
async def adder(task: dict, llm: rl.LLM) -> float:
    """Ask for a + b; return reward 1 for the right answer and 0 otherwise."""
    reply = await llm.client().chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": question(task)}],
        **SAMPLING | llm.sampling_parameters,
    )
    return 1.0 if is_right(task, reply.choices[0].message.content or "") else 0.0
