"""Questions: `words` (the problems of `data/`), `additions` (the only kind that the starter model solves), or
a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raylight.errors import DatasetError
from raylight.quickstart.additions import additions
from raylight.quickstart.additions import question as sum_of
from raylight.trainer.spec.task_files import read_tasks

DATA = Path(__file__).parent / "data"
OWN = ("words", "additions")
Questions = list[dict[str, Any]]


def training_questions(data: str) -> tuple[Questions, Questions]:
    """Return training and validation questions; of a file, every tenth question is for validation.

    Args:
        data: `words`, `additions`, or a file with `question` and `answer` in every line.

    Raises:
        DatasetError: the file cannot be read, or a question has no numeric answer.
    """
    if data == "words":
        return _checked(read_tasks(DATA / "train.jsonl")), _checked(read_tasks(DATA / "test.jsonl"))
    if data == "additions":
        train, val = additions(0)
        return _sums(train), _sums(val)
    tasks = _checked(read_tasks(data))
    if len(tasks) < 10:
        raise DatasetError(f"{data} has {len(tasks)} questions; training needs at least 10")
    return [task for i, task in enumerate(tasks) if i % 10], tasks[::10]


def benchmark_questions(data: str, limit: int | None = None) -> Questions:
    """Return the questions of a benchmark: the test questions of `words` or `additions`, or all of a file.

    Raises:
        DatasetError: the file cannot be read, or a question has no numeric answer.
    """
    questions = training_questions(data)[1] if data in OWN else _checked(read_tasks(data))
    return questions[:limit]


def _sums(tasks: list[dict[str, int]]) -> Questions:
    return [{"id": f"{t['a']}+{t['b']}", "question": sum_of(t), "answer": t["a"] + t["b"]} for t in tasks]


def _checked(tasks: list[Any]) -> Questions:
    for place, task in enumerate(tasks, 1):
        answer = task.get("answer") if isinstance(task, dict) else None
        if (
            not isinstance(answer, int | float)
            or isinstance(answer, bool)
            or not isinstance(task.get("question"), str)
        ):
            raise DatasetError(
                f'question {place} must look like {{"question": "...", "answer": 12}}; it is {task!r:.100}'
            )
    return tasks
