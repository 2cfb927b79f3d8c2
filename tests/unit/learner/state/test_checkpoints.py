"""Training states: complete or absent wherever a write is interrupted, and pruned by count."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raylight.errors import CheckpointError, ConfigError, DiskError
from raylight.learner.state.checkpoints import BackgroundWriter, TrainingStates, locate_state


@pytest.fixture(params=["folder", "file", "memory"])
def url(request, tmp_path: Path):
    MemoryFileSystem.store.clear()
    yield {"folder": str(tmp_path / "a"), "file": f"file://{tmp_path}/a", "memory": "memory://bucket/a"}[
        request.param
    ]
    MemoryFileSystem.store.clear()


def write(states: TrainingStates, step: int, text: str, metadata: dict[str, Any] | None = None) -> None:
    """Write a state whose content is a file with the text."""
    content = states.new_content(step)
    with states.writing(step), fsspec.open(f"{content}/part", "w", auto_mkdir=True) as file:
        file.write(text)
    states.complete(step, {"text": text} if metadata is None else metadata, content)


def read(states: TrainingStates, step: int) -> str:
    with states.reading(step) as content, fsspec.open(f"{content}/part", "r") as file:
        return file.read()


def test_states_are_listed_read_replaced_and_pruned(url: str):
    states = TrainingStates(url)
    assert states.steps() == []
    for step in (9, 10, 100):
        write(states, step, f"state {step}")
    assert TrainingStates(url).steps() == [9, 10, 100]
    assert TrainingStates(url).metadata(10) == {"text": "state 10"}
    write(states, 10, "again")
    assert read(states, 10) == "again"
    assert states.metadata(10) == {"text": "again"}
    states.prune(2)
    assert states.steps() == [10, 100]
    states.remove_after(10)
    assert states.steps() == [10]
    with pytest.raises(CheckpointError, match="step 100"):
        read(states, 100)


def test_a_failed_write_leaves_the_last_state(url: str):
    states = TrainingStates(url)
    write(states, 1, "one")
    write(states, 2, "two")
    for step in (2, 3):
        with fsspec.open(f"{states.new_content(step)}/part", "w", auto_mkdir=True) as file:
            file.write("half")
        with pytest.raises(CheckpointError, match="the network is down"), states.writing(step):
            raise OSError("the network is down")
    assert states.steps() == [1, 2]
    assert read(states, 2) == "two"
    write(states, 3, "three")
    states.prune(1)
    assert states.steps() == [3]


def test_a_state_without_marker_is_absent():
    MemoryFileSystem.store.clear()
    fs = MemoryFileSystem()
    fs.pipe("/bucket/step-3/training-1/part", b"content without marker")
    states = TrainingStates("memory://bucket")
    assert states.steps() == []
    write(states, 3, "new")
    assert states.steps() == [3]
    assert len(fs.ls("/bucket/step-3")) == 2
    MemoryFileSystem.store.clear()


def test_a_damaged_marker_is_named(tmp_path: Path):
    states = TrainingStates(str(tmp_path))
    write(states, 4, "a")
    (tmp_path / "step-4" / "COMPLETE").write_text("")
    with pytest.raises(CheckpointError, match="step-4/COMPLETE is damaged; remove the folder step-4"):
        states.metadata(4)


def test_a_store_that_lists_the_folder_in_itself_keeps_the_state(monkeypatch: pytest.MonkeyPatch):
    MemoryFileSystem.store.clear()
    states = TrainingStates("memory://bucket/a")
    listed = MemoryFileSystem.ls
    monkeypatch.setattr(
        MemoryFileSystem,
        "ls",
        lambda self, path, detail=True, **options: [
            *listed(self, path, detail=detail, **options),
            *([] if detail else [f"{path}/"]),
        ],
    )
    write(states, 4, "a")
    assert read(states, 4) == "a"
    MemoryFileSystem.store.clear()


def test_a_state_of_an_earlier_version_is_refused(tmp_path: Path):
    folder = tmp_path / "step-4"
    folder.mkdir()
    (folder / "training-1234abcd.pt").write_bytes(b"everything")
    (folder / "COMPLETE").write_text(json.dumps({"content": "training-1234abcd.pt", "version": 4}))
    states = TrainingStates(str(tmp_path))
    assert states.metadata(4) == {"version": 4}
    with pytest.raises(CheckpointError, match="earlier version of raylight, as a single file"):
        read(states, 4)


def test_a_full_disk_leaves_the_former_state(tmp_path: Path):
    states = TrainingStates(str(tmp_path))
    write(states, 2, "former")
    full = pytest.raises(DiskError, match=r"No space left on device.*MiB are free")
    with full, states.writing(2), open("/dev/full", "wb") as file:
        file.write(b"x" * 100_000)
    assert states.metadata(2) == {"text": "former"}
    assert read(states, 2) == "former"


EXIT_AT_CALL = """
import os
import pathlib
import shutil
import sys
from fsspec.implementations.local import LocalFileSystem
from raylight.learner.state.checkpoints import TrainingStates

for left, folder in enumerate(sys.argv[1:]):  # a process ends at each call
    if not os.fork():
        break
    code = os.waitstatus_to_exitcode(os.wait()[1])
    print(code, flush=True)
    if code != 9:
        sys.exit()

def counted(function):
    def call(*args, **named):
        global left
        left -= 1
        if left < 0:
            os._exit(9)
        return function(*args, **named)
    return call

for name in ("replace", "unlink", "rmdir", "remove", "fsync", "makedirs"):
    setattr(os, name, counted(getattr(os, name)))
shutil.rmtree = counted(shutil.rmtree)
LocalFileSystem.rm = counted(LocalFileSystem.rm)
states = TrainingStates(folder)
content = states.new_content(2)
os.makedirs(content)
for part in ("a", "b"):
    with open(os.path.join(content, part), "wb") as file:
        file.write(b"new")
        file.flush()
        os.fsync(file.fileno())
states.complete(2, {"text": "new"}, content)
"""


def test_a_rewritten_state_is_the_former_or_the_new_one_wherever_the_process_ends(tmp_path: Path):
    folders, seen = [tmp_path / str(calls) for calls in range(40)], []
    for folder in folders:
        write(TrainingStates(str(folder)), 2, "former")
    command = [sys.executable, "-c", EXIT_AT_CALL, *map(str, folders)]
    codes = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    assert codes == ["9"] * (len(codes) - 1) + ["0"]
    for folder in folders[: len(codes)]:
        states = TrainingStates(str(folder))
        assert states.steps() == [2]
        with states.reading(2) as content:
            found = {path.name: path.read_text() for path in Path(content).iterdir()}
        text = states.metadata(2)["text"]
        assert found == ({"part": "former"} if text == "former" else {"a": "new", "b": "new"})
        seen.append(text)
        states.complete(3, {})
        states.prune(2)
    assert len(seen) > 4
    assert {*seen} == {"former", "new"}
    assert len(list((folder / "step-2").iterdir())) == 2


def test_waiting_for_a_write_raises_its_error():
    go, order = threading.Event(), []
    writer = BackgroundWriter()
    writer.start(lambda: (go.wait(60), order.append("first")))
    assert order == []
    with pytest.raises(CheckpointError, match=r"not written within 0\.01 s.*write_timeout_s"):
        writer.wait(0.01)
    go.set()
    writer.wait(60)
    assert order == ["first"]
    writer.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        writer.wait(60)
    writer.wait(60)


def test_an_unknown_url_raises():
    with pytest.raises(ConfigError, match="nosuch://"):
        TrainingStates("nosuch://bucket")


def test_a_path_names_a_state_its_folder_or_a_run_whatever_its_name(tmp_path: Path):
    for name in ("run", "two-step-2", "step-3"):
        run = tmp_path / name
        (run / "state" / "step-8").mkdir(parents=True)
        assert locate_state(str(run)) == locate_state(f"{run}/") == (str(run / "state"), None)
        assert locate_state(f"{run}/state") == (f"{run}/state", None)
        assert locate_state(f"{run}/state/step-8/") == (f"{run}/state", 8)
    assert locate_state("s3://bucket/two-step-2") == ("s3://bucket/two-step-2", None)
    assert locate_state("s3://bucket/run/step-2/") == ("s3://bucket/run", 2)
