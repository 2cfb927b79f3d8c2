"""Tasks as rows of text, which can be stored anywhere and read without the environment's classes."""

from __future__ import annotations

import json
import random
from typing import Any

from examples.tau2_agent.domain import find_domain
from raylight.errors import DatasetError

SPLIT_SEED = 42

Row = dict[str, str]
"""A task as the input of a rollout: `environment`, `id`, and `task` (all other values, as JSON)."""


def as_row(environment: str, task: dict[str, Any]) -> Row:
    return {
        "environment": environment,
        "id": str(task["id"]),
        "task": json.dumps(task, ensure_ascii=False, sort_keys=True),
    }


def read_row(row: Row) -> tuple[str, dict[str, Any]]:
    """Return the environment's name and the task of a row.

    Raises:
        DatasetError: the row has another format.
    """
    try:
        return row["environment"], json.loads(row["task"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DatasetError(
            f"a task must be a row of examples.tau2_agent.tasks.load_rows, not {row!r:.200}: {error!r}"
        ) from None


def load_rows(environment: str) -> tuple[list[Row], list[Row]]:
    """Return all tasks of an environment: half for training, half for validation, always the same halves.

    Raises:
        ConfigError: the environment is unknown, or its package is not installed.
    """
    rows = sorted(
        (as_row(environment, task) for task in find_domain(environment).tasks()), key=lambda row: row["id"]
    )
    random.Random(SPLIT_SEED).shuffle(rows)
    half = len(rows) // 2
    return rows[:half], rows[half:]
