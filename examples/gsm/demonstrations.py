"""Demonstrations of a chain of thought: one operation after the other, and the answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from agent import SYSTEM
from reasoning_gym import create_dataset

SETTINGS = {"min_terms": 3, "max_terms": 3, "max_digits": 1}
"""Settings of the dataset `chain_sum`, small enough for a model of 0.2 million parameters."""
DEMONSTRATIONS = 4000
FIRST_SEED = 1_000_000
"""Far from the seeds of a run, which are the numbers of its tasks."""


def chains_of_thought(seed: int, held_out: Collection[str] = ()) -> Iterator[list[dict[str, Any]]]:
    """Yield conversations in which all answers are right.

    Args:
        held_out: questions that are left out.
    """
    for entry in create_dataset("chain_sum", size=DEMONSTRATIONS, seed=FIRST_SEED * (seed + 1), **SETTINGS):
        if entry["question"] not in held_out:
            yield [
                {"role": "system", "content": SYSTEM},
                {"role": "user", "content": entry["question"]},
                {"role": "assistant", "content": chain_of_thought(entry["metadata"]["expression"])},
            ]


def chain_of_thought(expression: str) -> str:
    """Return the steps of a sum such as `3 + 4 - 9`, and the marked answer."""
    first, *rest = expression.split()
    total, lines = int(first), []
    for sign, term in zip(rest[::2], rest[1::2], strict=True):
        result = total + int(term) if sign == "+" else total - int(term)
        lines.append(f"{total}{sign}{term}={result}")
        total = result
    return "\n".join([*lines, f"<answer>{total}</answer>"])
