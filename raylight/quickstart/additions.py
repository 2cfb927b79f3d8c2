"""The quickstart's task: add two two-digit numbers.

Small enough that a model of a quarter of a million parameters learns it in minutes on one core, yet a real task: the
validation pairs are held out for good, so a right answer there is computed and not remembered.
"""

import random

LOW, HIGH = 10, 99  # two digits each, so that every question has the same number of tokens
VALIDATION_TASKS = 128


def additions(seed: int) -> tuple[list[dict], list[dict]]:
    """Training and validation tasks: the same split for every seed, which only orders the training tasks."""
    pairs = [(a, b) for a in range(LOW, HIGH + 1) for b in range(LOW, HIGH + 1)]
    random.Random(0).shuffle(pairs)
    val = pairs[:VALIDATION_TASKS]
    held_out = {*val, *((b, a) for a, b in val)}  # b+a would give the answer to a+b away
    train = [pair for pair in pairs if pair not in held_out]
    random.Random(seed).shuffle(train)
    return [{"a": a, "b": b} for a, b in train], [{"a": a, "b": b} for a, b in val]


def question(task: dict) -> str:
    """The user's message."""
    return f"{task['a']}+{task['b']}="


def is_right(task: dict, text: str) -> bool:
    """Whether the answer is the sum and nothing else."""
    return text.strip() == str(task["a"] + task["b"])
