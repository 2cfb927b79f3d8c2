"""Leftovers of ended runs on a machine are found and removed; live processes and folders stay."""

import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from raylight.serving.deploy import leftovers
from raylight.serving.deploy.leftovers import Leftover, find_leftovers, remove, sweep

NODE = "ab" * 28
NAMED = "import sys, time; open(sys.argv[1]).read()"
"""Program of a process that stands for one of Ray's; it ends when the test opens its pipe."""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder and Ray's folder of a machine without runs, under a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        monkeypatch.setattr(leftovers, "_folder_path", lambda: Path(name))
        monkeypatch.setattr(leftovers, "ray_folder", lambda: Path(name, "ray"))
        monkeypatch.setattr(leftovers, "abandoned_folders", lambda: iter(()))
        Path(name, "ray").mkdir()
        yield Path(name)


@pytest.fixture
def raylet(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Arguments of the raylets of the machine; a test adds some."""
    arguments: set[str] = set()
    monkeypatch.setattr(leftovers, "_raylet_arguments", lambda: arguments)
    return arguments


def make_folder(root: Path) -> Path:
    path = root / NODE
    path.mkdir()
    (path / "haproxy.cfg").write_text("x" * 100)
    return path


def make_session(root: Path, name: str = "session_a") -> Path:
    path = root / "ray" / name
    (path / "logs").mkdir(parents=True)
    (path / "logs" / "raylet.out").write_text("x" * 50)
    leftovers.mark_session(name)
    return path


def test_folders_of_ended_nodes_and_sessions_are_removed(folder: Path, raylet: set[str]) -> None:
    ingress, session = make_folder(folder), make_session(folder)
    (folder / "ports.lock").touch()
    (folder / "ray" / "session_of_another_program").mkdir()
    found = find_leftovers()
    assert [(one.kind, one.name) for one in found] == [("folder", str(ingress)), ("session", str(session))]
    assert found[0].size == 100
    assert found[1].size >= 50
    assert all(map(remove, found))
    assert sorted(path.name for path in folder.rglob("*")) == [
        "ports.lock",
        "ray",
        "session_of_another_program",
    ]
    assert find_leftovers() == []
    assert all(map(remove, found)), "another run may have removed them"


def test_a_start_keeps_the_logs_of_ended_runs(
    folder: Path, raylet: set[str], caplog: pytest.LogCaptureFixture
) -> None:
    ingress, session = make_folder(folder), make_session(folder)
    caplog.set_level("INFO")
    sweep()
    assert not ingress.exists()
    assert session.exists()
    assert f"removed the folder of an ended HAProxy: {ingress}" in caplog.text


def test_what_is_alive_stays(folder: Path, raylet: set[str]) -> None:
    raylet |= {f"--node_id={NODE}", f"--session_dir={make_session(folder)}"}
    make_folder(folder)
    assert find_leftovers() == []


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_a_socket_that_accepts_is_alive(kind: socket.SocketKind, folder: Path, raylet: set[str]) -> None:
    """It may belong to a container that shares the file system."""
    path = make_folder(folder) / ("metrics.sock" if kind == socket.SOCK_DGRAM else "admin.sock")
    with socket.socket(socket.AF_UNIX, kind) as server:
        server.bind(str(path))
        if kind == socket.SOCK_STREAM:
            server.listen(1)
        assert find_leftovers() == []
    assert len(find_leftovers()) == 1, "its socket's file is still there"


def test_folders_of_others_stay(folder: Path, raylet: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    make_session(folder)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    assert find_leftovers() == []


def fake_haproxy(tmp_path: Path, config: str) -> list[str]:
    """Return the command of a process that looks like HAProxy."""
    program = tmp_path / "haproxy"
    if not program.exists():
        program.symlink_to(Path("/bin/cat").resolve())
        os.mkfifo(tmp_path / "pipe")
    return [str(program), str(tmp_path / "pipe"), config]


def test_haproxies_without_a_manager_are_killed_and_others_stay(folder: Path, tmp_path: Path) -> None:
    own = f"{folder}/{NODE}/haproxy.cfg"
    with subprocess.Popen(fake_haproxy(tmp_path, own)) as child:
        found = [one for one in find_leftovers() if one.name == str(child.pid)]
        assert len(found) == 1, "its parent, this test, is not a Ray worker"
        assert not remove_reused(found[0])
        assert child.poll() is None, "another process has this ID now"
        assert remove(found[0])
        child.wait(10)
    with subprocess.Popen(fake_haproxy(tmp_path, "/etc/haproxy/haproxy.cfg")) as other:
        assert str(other.pid) not in {one.name for one in find_leftovers()}
        other.kill()


def remove_reused(leftover: Leftover) -> bool:
    """Try to remove a process that ended, and whose ID another process has."""
    remove(Leftover("process", leftover.name, started=leftover.started - 1))
    return not psutil.pid_exists(int(leftover.name))


def test_the_haproxy_of_a_ray_worker_stays(folder: Path, tmp_path: Path) -> None:
    own = f"{folder}/{NODE}/haproxy.cfg"
    command = fake_haproxy(tmp_path, own)
    worker = [
        sys.executable,
        "-c",
        "import subprocess, sys; subprocess.run(sys.argv[2:])",
        "ray::HAProxyManager",
    ]
    with subprocess.Popen([*worker, *command]) as manager:
        process = psutil.Process(manager.pid)
        while not any("haproxy" in child.name() for child in process.children()):
            assert manager.poll() is None
        (child,) = process.children()
        assert str(child.pid) not in {one.name for one in find_leftovers()}
        manager.kill()
        manager.wait(10)
        assert str(child.pid) in {one.name for one in find_leftovers()}
        child.kill()


def test_the_user_s_folder_belongs_to_the_user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.chmod(0o755)
    assert leftovers.user_folder() == folder
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(PermissionError, match="belongs to user"):
        leftovers.user_folder()


def test_a_link_is_not_followed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = folder / "link"
    link.symlink_to(folder)
    monkeypatch.setattr(leftovers, "_folder_path", lambda: link)
    with pytest.raises(PermissionError):
        leftovers.user_folder()
