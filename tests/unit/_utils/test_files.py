"""Atomic writes: the old content or the new one, even when a write raises or its process is killed."""

import os
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from raylight._utils import files


def tree(root: Path) -> dict[str, str]:
    """Text of every file below a folder, by relative path."""
    return {str(p.relative_to(root)): p.read_text() for p in sorted(root.rglob("*")) if p.is_file()}


class Interrupted(Exception):
    """Raised in the middle of a write."""


def interrupt_file(path: Path) -> None:
    with files.atomic_file(path) as file:
        file.write(b"ne")
        raise Interrupted


def interrupt_folder(partial_folder: AbstractContextManager[Path]) -> None:
    with partial_folder as partial:
        (partial / "file").write_text("ne")
        raise Interrupted


def test_a_file_is_created_and_replaced(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / "file", "é\n")
    assert (tmp_path / "file").read_bytes() == "é\n".encode()
    files.write_atomic(str(tmp_path / "file"), b"\xff")
    assert (tmp_path / "file").read_bytes() == b"\xff"
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_whose_write_raises_keeps_its_content(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / "file", "old")
    with pytest.raises(Interrupted):
        interrupt_file(tmp_path / "file")
    assert tree(tmp_path) == {"file": "old"}


def test_the_new_name_appears_only_after_the_content_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (calls.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *names: (calls.append("replace"), replace(*names)))
    files.write_atomic(tmp_path / "file", "new")
    assert calls == ["fsync", "replace", "fsync"]  # the content, the rename, the folder


def test_a_folder_is_created_and_replaced(tmp_path: Path) -> None:
    for name in ("first", "second"):
        with files.atomic_folder(tmp_path / "deep" / "folder") as partial:
            (partial / "inner").mkdir()
            (partial / "inner" / name).write_text(name)
        assert tree(tmp_path) == {f"deep/folder/inner/{name}": name}
    assert os.listdir(tmp_path / "deep") == ["folder"]


def test_a_folder_whose_write_raises_keeps_its_content(tmp_path: Path) -> None:
    with files.atomic_folder(tmp_path / "folder") as partial:
        (partial / "file").write_text("old")
    with pytest.raises(Interrupted):
        interrupt_folder(files.atomic_folder(tmp_path / "folder"))
    assert tree(tmp_path) == {"folder/file": "old"}


def test_files_are_replaced_one_by_one_and_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for content in ("old", "new"):
        with files.atomic_files(folder) as partial:
            (partial / "file").write_text(content)
        (folder / "other").write_text("kept")
        assert tree(tmp_path) == {"folder/file": content, "folder/other": "kept"}
    with pytest.raises(Interrupted):
        interrupt_folder(files.atomic_files(folder))
    assert tree(tmp_path) == {"folder/file": "new", "folder/other": "kept"}


KILLED = {
    "file": "with files.atomic_file('target') as file:\n  file.write(b'new'); file.flush(); kill()",
    "folder": "with files.atomic_folder('target') as part:\n  (part / 'file').write_text('new'); kill()",
    "files": "with files.atomic_files('target') as part:\n  (part / 'file').write_text('new'); kill()",
    "fsync": "os.fsync = lambda handle: kill()\nfiles.write_atomic('target', 'new')",
}


@pytest.mark.parametrize("kind", KILLED)
def test_a_kill_leaves_the_old_content_and_the_next_write_cleans_up(tmp_path: Path, kind: str) -> None:
    target, is_file = tmp_path / "target", kind in ("file", "fsync")

    def write(text: str) -> None:
        if is_file:
            files.write_atomic(target, text)
        else:
            with files.atomic_folder(target) as partial:
                (partial / "file").write_text(text)

    write("old")
    code = (
        "import os, signal\nfrom raylight._utils import files\n"
        f"def kill(): os.kill(os.getpid(), signal.SIGKILL)\n{KILLED[kind]}"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == -9
    name = "target" if is_file else "target/file"
    assert tree(tmp_path)[name] == "old"
    assert (tmp_path / "target.partial").exists()
    write("newer")
    assert tree(tmp_path) == {name: "newer"}
    assert os.listdir(tmp_path) == ["target"]


def test_a_folder_killed_between_its_two_renames_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("new", "folder"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    replace = os.replace

    def killed(old: Path, new: Path) -> None:
        if old == tmp_path / "new":
            raise KeyboardInterrupt
        replace(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            files.replace_folder(tmp_path / "new", tmp_path / "folder")
    assert tree(tmp_path) == {"folder.old/file": "folder", "new/file": "new"}
    files.restore_folder(tmp_path / "folder")
    assert tree(tmp_path) == {"folder/file": "folder", "new/file": "new"}
    files.replace_folder(tmp_path / "new", tmp_path / "folder")
    assert tree(tmp_path) == {"folder/file": "new"}
