"""Functions to write: a goal in words, parameters, and hidden tests, which the right code has computed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from agent import question

GOALS = {
    "their sum": "{a} + {b}",
    "the first minus the second": "{a} - {b}",
    "their product": "{a} * {b}",
    "the larger one": "max({a}, {b})",
    "the smaller one": "min({a}, {b})",
    "the first modulo the second": "{a} % {b}",
    "their distance": "abs({a} - {b})",
    "if they are equal": "{a} == {b}",
}
PARAMETERS = ("ab", "mn", "pq", "xy")
TESTS = ((7, 2), (2, 9), (5, 5), (-3, 4))


def make_tasks(count: int, seed: int) -> list[dict[str, Any]]:
    """Return tasks with random goals and parameters."""
    chance = random.Random(seed)
    return [_task(chance) for _ in range(count)]


def _task(chance: random.Random) -> dict[str, Any]:
    goal = chance.choice(list(GOALS))
    a, b = chance.choice(PARAMETERS)
    tests = [
        {"arguments": values, "expected": eval(GOALS[goal].format(a=values[0], b=values[1]))}
        for values in TESTS
    ]
    return {"header": f"solve({a}, {b})", "goal": goal, "tests": tests}


def demonstrations(seed: int) -> Iterator[list[dict[str, Any]]]:
    """Yield questions with right answers."""
    for task in make_tasks(4000, seed):
        a, b = task["header"][6], task["header"][9]
        code = f"def {task['header']}: return {GOALS[task['goal']].format(a=a, b=b)}"
        yield [question(task), {"role": "assistant", "content": code}]
