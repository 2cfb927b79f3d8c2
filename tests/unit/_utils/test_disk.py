"""Exceptions about disks become one typed error; other exceptions stay."""

import errno
import os
from pathlib import Path

import pytest

from raylight._utils.disk import describe_space, disk_errors
from raylight.errors import CheckpointError, DiskError


class SafetensorError(Exception):
    """An error with the name of safetensors' own."""


def full(path: str | None = "/some/file") -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def nested() -> RuntimeError:
    """Return torch.save's error: about its own position, raised while an OSError is handled."""
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 2752 vs 2646")
    error.__context__ = full(None)
    return error


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (full(), "/some/file"),
        (nested(), "FOLDER"),
        (OSError(errno.EDQUOT, "Disk quota exceeded", "/q"), "/q"),
        (OSError(errno.EROFS, "Read-only file system"), "FOLDER"),
        (
            SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
            "FOLDER",
        ),
    ],
)
def test_an_error_about_a_disk(error: Exception, named: str, tmp_path: Path) -> None:
    with pytest.raises(DiskError) as caught, disk_errors(tmp_path):
        raise error
    text = str(caught.value)
    assert text.startswith(f"{named.replace('FOLDER', str(tmp_path))} cannot be written: ")
    assert "MiB are free on its disk" in text
    assert "fit(resume='auto')" in text


def test_a_folder_that_was_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(DiskError, match=r"summary.json cannot be written: No such file"), disk_errors(folder):
        (folder / "summary.json").write_text("{}")


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory", "/elsewhere/tasks.jsonl"),
        ConnectionResetError(errno.ECONNRESET, "reset"),
        ValueError("No space was left between two words"),
        CheckpointError("No space left on device"),
    ],
)
def test_other_errors_stay(error: Exception, tmp_path: Path) -> None:
    with pytest.raises(type(error)) as caught, disk_errors(tmp_path):
        raise error
    assert caught.value is error


def test_the_space_of_a_path_that_does_not_exist(tmp_path: Path) -> None:
    assert "MiB are free" in describe_space(tmp_path / "a" / "b")
