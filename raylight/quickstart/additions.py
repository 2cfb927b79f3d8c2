"""The quickstart's task: add two two-digit numbers.

A model of a quarter of a million parameters learns it within minutes on one core. Validation pairs are never
trained on, so a right answer to one of them is computed and not memorised.
"""

import random

LOW, HIGH = 10, 99  # always two digits, so that all questions have the same number of tokens
VALIDATION_TASKS = 128


def additions(seed: int) -> tuple[list[dict], list[dict]]:
    """Return training and validation tasks. The split is fixed; `seed` only orders the training tasks."""
    pairs = [(a, b) for a in range(LOW, HIGH + 1) for b in range(LOW, HIGH + 1)]
    random.Random(0).shuffle(pairs)
    val = pairs[:VALIDATION_TASKS]
    held_out = {*val, *((b, a) for a, b in val)}  # b+a would reveal the answer to a+b
    train = [pair for pair in pairs if pair not in held_out]
    random.Random(seed).shuffle(train)
    return [{"a": a, "b": b} for a, b in train], [{"a": a, "b": b} for a, b in val]


def training_tasks() -> list[dict]:
    """Return the training tasks, in the order of seed 0."""
    return additions(0)[0]


def validation_tasks() -> list[dict]:
    return additions(0)[1]


def question(task: dict) -> str:
    """Return the user message of a task."""
    return f"{task['a']}+{task['b']}="


def is_right(task: dict, text: str) -> bool:
    """Return True if the answer is the sum and nothing else."""
    return text.strip() == str(task["a"] + task["b"])
