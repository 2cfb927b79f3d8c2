"""The math agent: it solves a question with a calculator and returns the reward of its answer."""

from __future__ import annotations

from typing import Any

import raylight as rl
from examples.math_agent.answers import extract
from examples.math_agent.clients import find_client
from examples.math_agent.config import MathSettings
from examples.math_agent.grading import is_right


@rl.rollout(settings=MathSettings().model_dump())
async def math_agent(task: dict[str, Any], llm: rl.LLM, settings: dict[str, Any]) -> float:
    """Solve a task of Calc-X; the reward is 1 for the right answer, else 0.

    Args:
        task: with `question` and `result`.
        settings: the resource `settings`, `MathSettings(...).model_dump()`.

    Raises:
        CalculatorError: the MCP server failed; the rollout fails without a reward.
    """
    chosen = MathSettings.model_validate(settings)
    said = await find_client(chosen.client)(task["question"], llm, chosen)
    answer = extract(said, chosen.extractor)
    rl.emit_object({"answer": answer, "expected": task["result"]})
    return 1.0 if await is_right(answer, task["result"]) else 0.0
