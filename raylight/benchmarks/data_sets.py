"""Rows of a benchmark's data set: of the Hugging Face hub, at a fixed revision, or of a local folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from raylight.benchmarks.catalogue import Benchmark
from raylight.errors import DatasetError
from raylight.trainer.spec.task_files import FileTasks, json_lines, read_tasks


def read_rows(benchmark: Benchmark, source: str | None = None, limit: int | None = None) -> FileTasks:
    """Return the rows of a benchmark as tasks for `BenchmarkAgent`.

    Args:
        source: a folder with the files of the data set, or a file of rows; by default the hub, of which the
            cache is used first.
        limit: maximum number of rows, from the start.

    Raises:
        DatasetError: a file is not there or cannot be fetched, or its rows lack a column.
    """
    given = Path(source).expanduser() if source is not None else None
    if given is not None and given.is_file():
        rows = read_tasks(given, limit)
    else:
        first, *others = (_read(_find(benchmark, name, given)) for name in benchmark.files)
        for other in others:
            by_id = {row["id"]: row for row in other}
            first = [by_id[row["id"]] | row for row in first]
        rows = FileTasks(first[:limit], None)
    for row in rows:
        if missing := [name for name in benchmark.columns if name not in row]:
            raise DatasetError(
                f"{source or benchmark.repo}: a row of {benchmark.name} lacks {', '.join(missing)}; its rows "
                f"have the columns {', '.join(benchmark.columns)}, as in {benchmark.repo}"
            )
    return rows


def _read(path: Path) -> list[Any]:
    return list(json_lines(path)) if path.suffix == ".json" else read_tasks(path)


def _find(benchmark: Benchmark, name: str, folder: Path | None) -> Path:
    """Return the path of a file of the data set.

    Raises:
        DatasetError: it is not in the folder, or cannot be fetched.
    """
    hint = (
        f"fetch it where there is a network with `hf download {benchmark.repo} {' '.join(benchmark.files)} "
        f"--repo-type dataset --revision {benchmark.revision} --local-dir FOLDER`, and give --data FOLDER"
    )
    if folder is not None:
        if (found := folder / name).is_file():
            return found
        raise DatasetError(f"the folder {folder} has no file {name} of the data set {benchmark.repo}; {hint}")
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(benchmark.repo, name, repo_type="dataset", revision=benchmark.revision))
    except OSError as error:  # the hub's errors are OSErrors, offline ones too
        short = " ".join(str(error).split())[:200]
        raise DatasetError(
            f"the file {name} of the data set {benchmark.repo} cannot be fetched: {short}; {hint}"
        ) from error
