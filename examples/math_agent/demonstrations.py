"""Questions that a tiny model can solve, and demonstrations of their solution with the calculator."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

from examples.math_agent.calculator_server import build_server
from examples.math_agent.make_data import STEP, recipe, solve, tank
from examples.math_agent.prompts import instructions

DEMONSTRATIONS = 4000


def questions(count: int, seed: int) -> list[dict[str, str]]:
    """Return questions of two templates, with `question`, `chain` and `result`."""
    rng = random.Random(seed)
    problems = [(recipe, tank)[number % 2](rng) for number in range(count)]
    rows = [(problem.question, *solve(problem)) for problem in problems]
    return [dict(zip(("question", "chain", "result"), row, strict=True)) for row in rows]


def demonstrate(seed: int, extractor: str = "hashes") -> Iterator[dict[str, Any]]:
    """Yield conversations of the agent: question, calls of the calculator with their results, answer."""
    (tool,) = asyncio.run(build_server(None).list_tools())
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    for task in questions(DEMONSTRATIONS, 1_000_000 * (seed + 1)):
        messages: list[dict[str, Any]] = [
            {"role": "system", "content": instructions(extractor)},
            {"role": "user", "content": task["question"]},
        ]
        for number, (expression, result) in enumerate(STEP.findall(task["chain"])):
            call = {"name": tool.name, "arguments": json.dumps({"expression": expression})}
            name = f"call_{number}"
            messages += [
                {"role": "assistant", "tool_calls": [{"id": name, "type": "function", "function": call}]},
                {"role": "tool", "tool_call_id": name, "content": result},
            ]
        messages.append({"role": "assistant", "content": f"### {task['result']}"})
        yield {"messages": messages, "tools": [{"type": "function", "function": function}]}
