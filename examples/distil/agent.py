"""The agent: it asks a model to sort letters, with the OpenAI client."""

from __future__ import annotations

from typing import Any

import raylight as rl


def question(letters: str) -> list[dict[str, Any]]:
    """Return the messages that ask for the letters in alphabetical order."""
    text = f"Write the letters {letters} in alphabetical order. Answer with the letters only."
    return [{"role": "user", "content": text}]


@rl.rollout
async def sort_letters(task: dict[str, Any], llm: rl.LLM) -> float:
    """Return 1 if the answer is the letters of the task in alphabetical order, and 0 otherwise."""
    reply = await llm.client().chat.completions.create(
        model=llm.model, messages=question(task["letters"]), temperature=1.0, max_tokens=64
    )
    return float((reply.choices[0].message.content or "").strip() == "".join(sorted(task["letters"])))
