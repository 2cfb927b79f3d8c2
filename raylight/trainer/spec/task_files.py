"""Read tasks from a JSONL, JSON or Parquet file."""

from __future__ import annotations

import itertools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from raylight.errors import DatasetError

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")


class FileTasks(list[Any]):
    """The tasks of a file.

    Attributes:
        path: the file, which a run writes to its `config.yaml`; None if not all of its tasks are here.
    """

    def __init__(self, tasks: list[object], path: str | None) -> None:
        super().__init__(tasks)
        self.path = path


def read_tasks(path: str | Path, limit: int | None = None) -> FileTasks:
    """Return the tasks of a file: each line of JSONL, each entry of a JSON list, or each row of Parquet as a
    dict.

    Args:
        limit: maximum number of tasks to read, from the start; None reads all.

    Raises:
        DatasetError: the file does not exist, has an unknown suffix, is malformed, or has no tasks.
    """
    path = Path(path).expanduser().absolute()
    if not os.path.isfile(path):  # Path.is_file raises for a name of 300 letters
        raise DatasetError(f"there is no file {path}; give the path of a {', '.join(SUFFIXES)} file")
    if path.suffix not in SUFFIXES:
        raise DatasetError(
            f"{path} is not a {', '.join(SUFFIXES)} file; write the tasks as one JSON value per line to a "
            "*.jsonl file"
        )
    try:
        tasks = list(itertools.islice(_tasks(path), limit))
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from None
    if not tasks:
        raise DatasetError(f"{path} has no tasks; write at least one")
    return FileTasks(tasks, str(path) if limit is None else None)


def _tasks(path: Path) -> Iterator[object]:
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    return _json_entries(path) if path.suffix == ".json" else json_lines(path)


def json_lines(path: Path) -> Iterator[object]:
    """Yield the value of each line of a file."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield _parse(line, f"{path}, line {number}")


def _json_entries(path: Path) -> Iterator[object]:
    content = _parse(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(content, list):
        raise DatasetError(f"{path} has a JSON {type(content).__name__}; write a list of tasks")
    return iter(content)


def _parquet_rows(path: Path) -> Iterator[object]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise DatasetError(
            f"{path}: reading Parquet requires pyarrow; pip install pyarrow, or give a .jsonl file"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            repeated = [name for name, count in Counter(file.schema_arrow.names).items() if count > 1]
            if repeated:
                raise DatasetError(
                    f"{path} has several columns of the name {repeated[0]!r:.200}, of which a task has one; "
                    "rename them"
                )
            for batch in file.iter_batches(batch_size=1024):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:  # such as a date after the year 9999
        raise DatasetError(f"{path} is not a valid Parquet file of tasks: {error}") from None


def _parse(text: str, source: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{source} is not valid JSON: {error}") from None
