"""Demonstrations: the query to a question, as a call of the tool."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from agent import SYSTEM, query_tool
from database import make_database, make_task
from langchain_core.utils.function_calling import convert_to_openai_tool

DEMONSTRATIONS = 4000


def queries(seed: int) -> Iterator[dict[str, Any]]:
    """Yield conversations with right queries."""
    chance = random.Random(f"demonstrations {seed}")
    tools = [convert_to_openai_tool(query_tool(make_database(0), []))]
    for _ in range(DEMONSTRATIONS):
        task = make_task(chance)
        call = {"name": "query", "arguments": json.dumps({"sql": task["query"]})}
        yield {
            "messages": [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": task["question"]},
                {"role": "assistant", "tool_calls": [{"id": "call_1", "type": "function", "function": call}]},
            ],
            "tools": tools,
        }
