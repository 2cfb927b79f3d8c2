"""The agent: it answers a customer. Its reward shows how courteous it is, and is not trained on."""

from __future__ import annotations

import re

import raylight as rl

INSTRUCTIONS = "Answer the customer in three short sentences."


@rl.rollout
async def answer_customer(task: dict[str, str], llm: rl.LLM) -> dict[str, float]:
    """Return 1 for a courteous answer of three sentences at most: the rule that is not trained on."""
    messages = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": task["message"]},
    ]
    reply = await llm.client().chat.completions.create(model=llm.model, messages=messages, max_tokens=64)
    answer = reply.choices[0].message.content or ""
    return {"courteous": float(merit(answer) == 2)}


def merit(answer: str) -> int:
    """Return `courtesy` of an answer, less three points for more than three sentences."""
    return courtesy(answer) - 3 * (answer.count(".") > 3)


def courtesy(answer: str) -> int:
    """Return the points of an answer: one for thanks, one for an apology, and one less for blame."""
    signs = {r"\bthank": 1, r"\bsorry|\bapolog": 1, r"\byour fault\b": -1}
    return sum(points for sign, points in signs.items() if re.search(sign, answer.lower()))
