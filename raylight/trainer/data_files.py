"""Tasks from a file: JSONL, JSON or Parquet."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raylight.errors import DatasetError

KINDS = (".jsonl", ".ndjson", ".json", ".parquet")


def read_tasks(path: str | Path, limit: int | None = None) -> list[Any]:
    """The tasks of a file, each as it is there: a line of JSONL, an entry of a JSON list, a row of Parquet as a dict.

    Args:
        limit: how many to read at most, from the beginning; None reads all.

    Raises:
        DatasetError: there is no such file, it is of another kind or malformed, or it holds no task.
    """
    path = Path(path).expanduser()
    if not path.is_file():
        raise DatasetError(f"there is no file {path}")
    if path.suffix not in KINDS:
        raise DatasetError(
            f"{path} is no {', '.join(KINDS)} file; write the tasks as one JSON value a line, and call it *.jsonl"
        )
    try:
        tasks = list(itertools.islice(_tasks(path), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from None
    if not tasks:
        raise DatasetError(f"{path} holds no task")
    return tasks


def _tasks(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        return _rows(path)
    return _entries(path) if path.suffix == ".json" else _lines(path)


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parsed(line, f"{path}, line {number}")


def _entries(path: Path) -> Iterator[Any]:
    found = _parsed(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(found, list):
        raise DatasetError(f"{path} holds a {type(found).__name__}; it should be a list of tasks")
    return iter(found)


def _rows(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise DatasetError(
            f"{path}: Parquet is read by pyarrow; pip install pyarrow, or give a .jsonl file"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise DatasetError(f"{path} is no Parquet file: {error}") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DatasetError(f"{where}: {error}") from None
