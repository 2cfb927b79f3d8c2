"""The agent: it asks for three things of a kind, and scores the form of the answer."""

from __future__ import annotations

import raylight as rl

TRAINING = [
    "colors",
    "cities",
    "countries",
    "rivers",
    "sports",
    "tools",
    "birds",
    "trees",
    "metals",
    "planets",
    "drinks",
    "languages",
    "instruments",
    "vegetables",
    "fish",
    "flowers",
]
VALIDATION = ["animals", "fruits", "gems", "fabrics", "cars", "jobs", "games", "insects"]
MAX_TOKENS = 32
LONGEST_LIST = 80
"""Characters within which an answer must end."""


def score(text: str, finish_reason: str | None) -> float:
    """Return 0.5 for three parts of one or two words each, and 0.5 for an end within 80 characters."""
    parts = [part.split() for part in text.strip().rstrip(".").split(",")]
    is_list = len(parts) == 3 and all(1 <= len(part) <= 2 for part in parts)
    has_ended = finish_reason == "stop" and len(text.strip()) < LONGEST_LIST
    return 0.5 * is_list + 0.5 * has_ended


@rl.rollout
async def list_three(task: dict[str, str], llm: rl.LLM) -> float:
    """Ask for three things of a kind."""
    question = f"Write a list of three {task['kind']}, separated by commas, nothing else."
    reply = await llm.client().chat.completions.create(
        model=llm.model,
        messages=[{"role": "user", "content": question}],
        temperature=1.0,
        max_tokens=MAX_TOKENS,
    )
    return score(reply.choices[0].message.content or "", reply.choices[0].finish_reason)
