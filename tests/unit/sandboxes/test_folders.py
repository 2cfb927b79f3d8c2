"""Folders of sandboxes: a killed process's folders are found and removed, a living one's never."""

import errno
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from raylight.sandboxes import folders
from raylight.sandboxes.folders import SandboxFolder, abandoned_folders, remove_abandoned
from raylight.serving.deploy.leftovers import find_leftovers, remove

HOLDER = """
from raylight.sandboxes.folders import SandboxFolder
folder = SandboxFolder()
print(folder.path, flush=True)
input()
"""


def refuse(path: str, *arguments: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), path)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder for temporary files, of this process and of those that it starts."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(folders, "_swept", {str(tmp_path)})
    return tmp_path


def abandon() -> str:
    """Return the folder of a process that was killed, with a part that is read-only."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        path = holder.stdout.readline().strip()
        assert path not in abandoned_folders(), "its process is alive"
        Path(path, "locked").mkdir()
        Path(path, "locked", "file").write_text("x" * 100)
        Path(path, "locked").chmod(0o500)
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    return path


def test_the_folder_of_a_killed_process_is_a_leftover(temporary: Path) -> None:
    path, own = abandon(), SandboxFolder()
    assert list(abandoned_folders()) == [path]
    (leftover,) = [one for one in find_leftovers() if one.kind == "sandbox"]
    assert (leftover.name, leftover.size) == (path, 100)
    assert str(leftover).startswith(f"folder of an ended sandbox: {path}")
    assert remove(leftover)
    assert sorted(os.listdir(temporary)) == sorted(
        [os.path.basename(own.path), f"{os.path.basename(own.path)}.lock"]
    )
    own.remove()
    assert os.listdir(temporary) == []


def test_the_next_process_removes_it(temporary: Path) -> None:
    path = abandon()
    folders._swept.clear()
    SandboxFolder().remove()
    assert not os.path.exists(path)
    assert os.listdir(temporary) == []


# a path has 4096 characters, Python 1000 nested calls, and a process often 1024 open files
@pytest.mark.parametrize(("name", "depth"), [("d", 2100), ("d" * 250, 1100)])
def test_a_folder_that_is_nested_deeper_than_a_path_is_removed(
    temporary: Path, name: str, depth: int
) -> None:
    folder, before = SandboxFolder(), os.open(".", os.O_RDONLY)
    os.chdir(folder.path)
    try:
        for _ in range(depth):
            os.mkdir(name)
            os.chdir(name)
        Path("file").write_text("at the bottom")
        os.symlink("/", "root")
        os.chmod(".", 0o500)
    finally:
        os.fchdir(before)
        os.close(before)
    folder.remove()
    assert os.listdir(temporary) == []


def test_the_warning_about_a_part_that_stays_is_short(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = SandboxFolder()
    Path(folder.path, "kept" * 60).touch()
    monkeypatch.setattr(os, "unlink", refuse)
    folder.remove()
    monkeypatch.undo()
    (warning,) = caplog.messages
    assert f"a part of {folder.path} cannot be removed (Operation not permitted)" in warning
    assert len(warning) < 300
    remove_abandoned(folder.path)
    assert os.listdir(temporary) == []


def test_a_folder_in_use_is_left_alone() -> None:
    folder = SandboxFolder()
    remove_abandoned(folder.path)
    assert os.path.isdir(folder.path)
    folder.remove()


def test_a_folder_that_cannot_be_made_has_no_lock(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: str, mode: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "mkdir", full)
    with pytest.raises(OSError, match="no space"):
        SandboxFolder()
    monkeypatch.undo()
    assert os.listdir(temporary) == []


def test_a_part_that_cannot_be_removed_keeps_its_lock_and_stops_no_sandbox(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = abandon()
    folders._swept.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "chmod", refuse)
        patch.setattr(os, "rmdir", refuse)
        own = SandboxFolder()
        assert f"a part of {path} cannot be removed" in caplog.text
        own.remove()
        assert f"a part of {own.path} cannot be removed" in caplog.text
    assert list(abandoned_folders()) == sorted([path, own.path])
