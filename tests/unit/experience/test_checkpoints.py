"""Training states: complete or absent wherever a write is interrupted, and pruned by count."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raylight.errors import CheckpointError, ConfigError, DiskError
from raylight.experience.checkpoints import BackgroundWriter, TrainingStates


@pytest.fixture(params=["folder", "file", "memory"])
def url(request, tmp_path: Path):
    MemoryFileSystem.store.clear()
    yield {"folder": str(tmp_path / "a"), "file": f"file://{tmp_path}/a", "memory": "memory://bucket/a"}[
        request.param
    ]
    MemoryFileSystem.store.clear()


def content(text: str):
    """Return a function that writes the text."""
    return lambda file: file.write(text.encode())


def test_states_are_listed_read_replaced_and_pruned(url: str):
    states = TrainingStates(url)
    assert states.steps() == []
    for step in (9, 10, 100):
        states.write(step, {"version": step}, content(f"state {step}"))
    assert TrainingStates(url).steps() == [9, 10, 100]
    assert TrainingStates(url).metadata(10) == {"version": 10}
    states.write(10, {"version": 11}, content("again"))
    with TrainingStates(url).open(10) as file:
        assert file.read() == b"again"
    assert states.metadata(10) == {"version": 11}
    states.prune(2)
    assert states.steps() == [10, 100]
    states.remove_after(10)
    assert states.steps() == [10]
    with pytest.raises(CheckpointError, match="step 100"):
        states.open(100)


def test_a_failed_write_leaves_the_last_state(url: str):
    def failing_dump(file):
        file.write(b"half")
        raise OSError("the disk is full")

    states = TrainingStates(url)
    states.write(1, {}, content("one"))
    with pytest.raises(CheckpointError, match="the disk is full"):
        states.write(2, {}, failing_dump)
    assert states.steps() == [1]
    states.write(2, {}, content("two"))
    states.prune(1)
    assert states.steps() == [2]


def test_a_state_without_marker_is_absent():
    MemoryFileSystem.store.clear()
    fs = MemoryFileSystem()
    fs.pipe("/bucket/step-3/training.pt", b"content without marker")
    states = TrainingStates("memory://bucket")
    assert states.steps() == []
    states.write(3, {}, content("new"))
    assert states.steps() == [3]
    MemoryFileSystem.store.clear()


WRITE_UNTIL_KILLED = """
import sys
from raylight.experience.checkpoints import TrainingStates

def dump(file):
    file.write(b"x" * 1_000_000)
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()

TrainingStates(sys.argv[1]).write(2, {}, dump)
"""


def test_a_killed_write_leaves_other_states(tmp_path: Path):
    states = TrainingStates(str(tmp_path))
    states.write(1, {"version": 1}, content("one"))
    saving = subprocess.Popen(
        [sys.executable, "-c", WRITE_UNTIL_KILLED, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert saving.stdout
    assert saving.stdout.readline() == "writing\n"
    saving.kill()
    saving.wait()
    assert sum(file.stat().st_size for file in (tmp_path / "step-2").iterdir()) == 1_000_000
    assert states.steps() == [1]
    with states.open(1) as file:
        assert file.read() == b"one"
    states.write(3, {}, content("three"))
    states.prune(2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-1", "step-3"]


EXIT_AT_CALL = """
import os
import shutil
import sys
from fsspec.implementations.local import LocalFileSystem
from raylight.experience.checkpoints import TrainingStates

left = int(sys.argv[2])

def counted(function):
    def call(*args, **named):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return function(*args, **named)
    return call

for name in ("replace", "unlink", "rmdir", "remove", "fsync"):
    setattr(os, name, counted(getattr(os, name)))
LocalFileSystem.rm_file = counted(LocalFileSystem.rm_file)
TrainingStates(sys.argv[1]).write(2, {"version": "new"}, lambda file: file.write(b"new"))
"""


def test_a_full_disk_leaves_the_former_state(tmp_path: Path):
    states = TrainingStates(str(tmp_path))
    states.write(2, {"version": "former"}, content("former"))

    def fill(file: Any) -> None:
        with open("/dev/full", "wb") as full:
            full.write(b"x" * 100_000)

    with pytest.raises(DiskError, match=r"No space left on device.*MiB are free"):
        states.write(2, {"version": "new"}, fill)
    assert states.metadata(2) == {"version": "former"}
    assert states.open(2).read() == b"former"


def test_a_rewritten_state_is_the_former_or_the_new_one_wherever_the_process_ends(tmp_path: Path):
    code, calls, seen = 9, 0, []
    while code:
        folder = tmp_path / str(calls)
        states = TrainingStates(str(folder))
        states.write(2, {"version": "former"}, content("former"))
        code = subprocess.run(
            [sys.executable, "-c", EXIT_AT_CALL, str(folder), str(calls)], check=False
        ).returncode
        assert code in (0, 9)
        assert states.steps() == [2]
        with states.open(2) as file:
            assert file.read().decode() == states.metadata(2)["version"]
        seen.append(states.metadata(2)["version"])
        calls += 1
    assert calls > 4
    assert {*seen} == {"former", "new"}
    assert len(list((folder / "step-2").iterdir())) == 2


def test_a_failed_upload_leaves_the_former_state():
    def failing_dump(file):
        raise OSError("the network is down")

    MemoryFileSystem.store.clear()
    states = TrainingStates("memory://bucket")
    states.write(3, {"version": 1}, content("one"))
    with pytest.raises(CheckpointError, match="the network is down"):
        states.write(3, {"version": 2}, failing_dump)
    assert states.metadata(3) == {"version": 1}
    with states.open(3) as file:
        assert file.read() == b"one"
    MemoryFileSystem.store.clear()


def test_waiting_for_a_write_raises_its_error():
    go, order = threading.Event(), []
    writer = BackgroundWriter()
    writer.start(lambda: (go.wait(5), order.append("first")))
    assert order == []
    go.set()
    writer.wait()
    assert order == ["first"]
    writer.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.wait()
    writer.wait()


def test_an_unknown_url_raises():
    with pytest.raises(ConfigError, match="nosuch://"):
        TrainingStates("nosuch://bucket")
