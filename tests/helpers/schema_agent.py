"""Agent whose answers must fit a JSON schema, and its task: a value of an enum that depends on the question.

The choice of the value is the only thing to learn: the schema forces all other tokens.
"""

import json
from typing import Any

from openai import AsyncOpenAI

import raylight as rl

SCHEMA: dict[str, Any] = {"enum": ["A", "B"]}
"""One value instead of an object: a model that has never seen JSON repeats white space between its parts."""
FORMAT = {"type": "json_schema", "json_schema": {"name": "kind", "schema": SCHEMA, "strict": True}}
MAX_TOKENS = 8
ANSWERS = {11: "A", 97: "B"}
"""Number in the question -> right value. At first the model chooses A and B about equally often."""


def questions(count: int) -> list[dict[str, int]]:
    """Return tasks."""
    return [{"number": (11, 97)[i % 2]} for i in range(count)]


def score(task: dict[str, int], text: str) -> float:
    """Return 1 for the right value, 0 for the wrong one or an answer that was cut off."""
    try:
        answer = json.loads(text)
    except ValueError:
        return 0.0
    return float(answer == ANSWERS[task["number"]])


@rl.rollout
async def schema_agent(task: dict[str, int], llm: rl.LLM) -> float:
    async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
        reply = await client.chat.completions.create(
            model=llm.model,
            messages=[{"role": "user", "content": f"{task['number']}+{task['number']}="}],
            response_format=FORMAT,
            **{"temperature": 1.0, "max_tokens": MAX_TOKENS, **llm.sampling_parameters},
        )
    return score(task, reply.choices[0].message.content or "")
