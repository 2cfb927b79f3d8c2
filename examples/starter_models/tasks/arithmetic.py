"""Additions of two-digit numbers, as the quickstart's agents ask for them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

from raylight.quickstart.additions import additions, question
from raylight.quickstart.calculator import ADD


def add(seed: int) -> Iterator[dict[str, Any]]:
    """Yield the quickstart's additions with their sums, validation additions first."""
    for task in _tasks(seed):
        yield {
            "messages": [
                {"role": "user", "content": question(task)},
                {"role": "assistant", "content": str(task["a"] + task["b"])},
            ]
        }


def calculator(seed: int) -> Iterator[dict[str, Any]]:
    """Yield dialogues of the quickstart's agent with a tool: question, call of `add`, result, answer."""
    for task in _tasks(seed):
        function = {"name": "add", "arguments": json.dumps(task)}
        total = str(task["a"] + task["b"])
        yield {
            "messages": [
                {"role": "user", "content": f"What is {task['a']} + {task['b']}?"},
                {
                    "role": "assistant",
                    "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
                },
                {"role": "tool", "tool_call_id": "call_1", "content": total},
                {"role": "assistant", "content": total},
            ],
            "tools": [ADD],
        }


def _tasks(seed: int) -> Iterator[dict[str, int]]:
    train, val = additions(seed)
    return itertools.chain(val, train)
