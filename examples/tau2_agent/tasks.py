"""Tasks as they travel: rows of text, so that a dataset can be stored anywhere and read without the environment's own classes."""

from __future__ import annotations

import json
import random
from typing import Any

from examples.tau2_agent.domain import find_domain
from raylight.errors import DatasetError

SPLIT_SEED = 42

Row = dict[str, str]
"""A task as a rollout is given it: `environment`, `id`, and `task`, the rest as JSON."""


def as_row(environment: str, task: dict[str, Any]) -> Row:
    return {
        "environment": environment,
        "id": str(task["id"]),
        "task": json.dumps(task, ensure_ascii=False, sort_keys=True),
    }


def read_row(row: Row) -> tuple[str, dict[str, Any]]:
    """The environment's name and the task of a row.

    Raises:
        DatasetError: it is no such row.
    """
    try:
        return row["environment"], json.loads(row["task"])
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise DatasetError(
            f"a task must be a row of examples.tau2_agent.tasks.load_rows, not {row!r:.200}: {error!r}"
        ) from None


def load_rows(environment: str) -> tuple[list[Row], list[Row]]:
    """All tasks of an environment, half of them to train on and half to validate with; always the same halves.

    Raises:
        ConfigError: there is no such environment, or what it needs is not installed.
    """
    rows = sorted(
        (as_row(environment, task) for task in find_domain(environment).tasks()), key=lambda row: row["id"]
    )
    random.Random(SPLIT_SEED).shuffle(rows)
    half = len(rows) // 2
    return rows[:half], rows[half:]
