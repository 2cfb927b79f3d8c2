"""Teacher and student: a small model that sorts, and a smaller one with random weights."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from agent import question
from transformers import AutoTokenizer

from examples.starter_models.make import recipe_model
from examples.starter_models.model import build_model

LETTERS, LENGTH = "abcdefgh", 5
DEMONSTRATIONS, TEACHING_STEPS = 6000, 120


def make_tasks(count: int, seed: int | str) -> list[dict[str, Any]]:
    """Return tasks with random letters."""
    chance = random.Random(seed)
    return [{"letters": "".join(chance.choices(LETTERS, k=LENGTH))} for _ in range(count)]


def demonstrations(seed: int) -> Iterator[list[dict[str, Any]]]:
    for task in make_tasks(DEMONSTRATIONS, f"demonstrations {seed}"):
        answer = {"role": "assistant", "content": "".join(sorted(task["letters"]))}
        yield [*question(task["letters"]), answer]


def make_models(folder: Path, seed: int) -> tuple[str, str]:
    """Save the teacher, taught until it sorts most words, and the student; return their folders."""
    student = folder / "student"
    teacher = recipe_model(
        demonstrations,
        folder / "teacher",
        size="small",
        accuracy=0.85,
        steps=TEACHING_STEPS,
        seed=seed,
        report=None,
    )
    tokenizer = AutoTokenizer.from_pretrained(teacher)
    torch.manual_seed(seed)
    build_model(tokenizer, "tiny").save_pretrained(student)
    tokenizer.save_pretrained(student)
    return teacher, str(student)
