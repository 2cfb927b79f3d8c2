"""The math agent: a question, a calculator, an answer that is right or not."""

from __future__ import annotations

from typing import Any

import raylight as rl
from examples.math_agent.answers import extract
from examples.math_agent.clients import find_client
from examples.math_agent.config import MathSettings
from examples.math_agent.grading import is_right


@rl.rollout(settings=MathSettings())
async def math_agent(task: dict[str, Any], llm: rl.LLM, settings: MathSettings) -> float:
    """Solve a task of Calc-X; the reward is 1 for the right answer, and 0 for a wrong one or none.

    Args:
        task: with `question` and `result`.
        settings: a resource; another one is given as `Trainer(initial_resources={"settings": MathSettings(...)})`.

    Raises:
        CalculatorError: the MCP server failed; the rollout does, and is not scored.
    """
    solve = find_client(settings.client)
    said = await solve(task["question"], llm, settings)
    answer = extract(said, settings.extractor)
    rl.emit_object({"answer": answer, "expected": task["result"]})
    return 1.0 if await is_right(answer, task["result"]) else 0.0
