"""Training states: complete or absent, kept by count; and where a run begins."""

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from raylight.errors import CheckpointError, ConfigError
from raylight.experience.checkpoints import BackgroundWriter, TrainingStates
from raylight.trainer.report import Report
from raylight.trainer.resume import (
    affects_updates,
    changed_settings,
    find_resume_point,
    fresh_start,
    prepare_states,
    resume_after,
    resume_point_of,
    state_metadata,
)


@pytest.fixture(params=["folder", "file", "memory"])
def url(request, tmp_path: Path):
    MemoryFileSystem.store.clear()
    yield {"folder": str(tmp_path / "a"), "file": f"file://{tmp_path}/a", "memory": "memory://bucket/a"}[
        request.param
    ]
    MemoryFileSystem.store.clear()


def content(text: str):
    return lambda file: file.write(text.encode())


def test_states_are_found_read_replaced_and_pruned(url: str):
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


def test_a_write_that_fails_leaves_the_last_state(url: str):
    def breaks(file):
        file.write(b"half")
        raise OSError("the disk is full")

    states = TrainingStates(url)
    states.write(1, {}, content("one"))
    with pytest.raises(CheckpointError, match="the disk is full"):
        states.write(2, {}, breaks)
    assert states.steps() == [1]
    states.write(2, {}, content("two"))
    states.prune(1)
    assert states.steps() == [2]


def test_an_object_store_has_a_state_only_when_the_marker_is_there():
    MemoryFileSystem.store.clear()
    fs = MemoryFileSystem()
    fs.pipe("/bucket/step-3/training.pt", b"whole, but nobody knows")
    states = TrainingStates("memory://bucket")
    assert states.steps() == []
    states.write(3, {}, content("new"))
    assert states.steps() == [3]
    MemoryFileSystem.store.clear()


KILLED = """
import sys
from raylight.experience.checkpoints import TrainingStates

def dump(file):
    file.write(b"x" * 1_000_000)
    file.flush()
    print("writing", flush=True)
    sys.stdin.read()

TrainingStates(sys.argv[1]).write(2, {}, dump)
"""


def test_a_save_that_is_killed_spoils_nothing(tmp_path: Path):
    states = TrainingStates(str(tmp_path))
    states.write(1, {"version": 1}, content("one"))
    saving = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)],
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


WRITES_AGAIN = """
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

for room, name in ((os, "replace"), (os, "unlink"), (os, "rmdir"), (os, "remove"), (LocalFileSystem, "rm_file"), (os, "fsync")):
    setattr(room, name, counted(getattr(room, name)))
TrainingStates(sys.argv[1]).write(2, {"version": "new"}, lambda file: file.write(b"new"))
"""


def test_a_state_that_is_written_again_is_the_former_or_the_new_one_wherever_a_kill_comes(tmp_path: Path):
    code, calls, seen = 9, 0, []
    while code:
        folder = tmp_path / str(calls)
        states = TrainingStates(str(folder))
        states.write(2, {"version": "former"}, content("former"))
        code = subprocess.run(
            [sys.executable, "-c", WRITES_AGAIN, str(folder), str(calls)], check=False
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


def test_an_upload_that_fails_leaves_the_state_that_it_was_to_replace():
    def breaks(file):
        raise OSError("the network is down")

    MemoryFileSystem.store.clear()
    states = TrainingStates("memory://bucket")
    states.write(3, {"version": 1}, content("one"))
    with pytest.raises(CheckpointError, match="the network is down"):
        states.write(3, {"version": 2}, breaks)
    assert states.metadata(3) == {"version": 1}
    with states.open(3) as file:
        assert file.read() == b"one"
    MemoryFileSystem.store.clear()


def test_the_next_save_waits_for_the_last_and_tells_of_its_failure():
    import threading

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


def test_a_url_that_nothing_opens_is_an_error():
    with pytest.raises(ConfigError, match="nosuch://"):
        TrainingStates("nosuch://bucket")


CONFIG = {
    "name": "run-1",
    "seed": 0,
    "total_steps": 20,
    "algorithm": {
        "name": "GRPO",
        "model": "/m",
        "lr": 1e-4,
        "n_steps": 20,
        "lr_schedule": "constant",
        "critic": None,
    },
    "learner": {"n": 1, "lora": None},
    "tasks": {"number": 3, "digest": "abc"},
}


def changed(**values: object) -> dict:
    """CONFIG with other values, by dotted name with two underscores."""
    config = json.loads(json.dumps(CONFIG))
    for name, value in values.items():
        *rooms, last = name.split("__")
        inner = config
        for room in rooms:
            inner = inner[room]
        inner[last] = value
    return config


@pytest.mark.parametrize(
    ("values", "updates"),
    [
        ({"name": "run-2"}, None),
        ({"learner__n": 2}, False),
        ({"algorithm__n_steps": 40, "total_steps": 40}, False),
        ({"algorithm__lr": 1e-3}, True),
        ({"seed": 1}, True),
        ({"tasks__digest": "xyz"}, True),
        ({"algorithm__lr_schedule": "cosine", "total_steps": 40}, True),
    ],
)
def test_what_differs_and_whether_it_changes_updates(values: dict, updates: bool | None):
    now = changed(**values)
    found = changed_settings(CONFIG, now)
    assert bool(found) == (updates is not None)
    assert any(affects_updates(name, now) for name in found) == bool(updates)


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm__model": "/other"},
        {"algorithm__name": "PPO"},
        {"learner__lora": {"rank": 8}},
        {"algorithm__critic": {"lr": 1}},
    ],
)
def test_another_model_algorithm_or_adapter_is_an_error(values: dict):
    with pytest.raises(ConfigError, match="training state belongs to another run"):
        changed_settings(CONFIG, changed(**values))


def about(start, version: int = 5, taken: int = 30) -> dict:
    return state_metadata(
        start,
        CONFIG,
        version=version,
        tasks_consumed=taken,
        steps_without_signal=1,
        evaluation={"best": None},
    )


def test_a_run_begins_anew_goes_on_or_says_what_is_missing(tmp_path: Path):
    url = str(tmp_path / "state")
    assert find_resume_point(False, url, CONFIG, 0).is_fresh
    assert find_resume_point("auto", url, CONFIG, 0).is_fresh
    with pytest.raises(ConfigError, match="no complete training state"):
        find_resume_point(True, url, CONFIG, 0)

    new = fresh_start()
    prepare_states(new, url, CONFIG)
    start = find_resume_point(
        "auto", url, CONFIG, 0
    )  # killed before the first state: the store has the rollouts since
    assert (start.step, start.version, start.lineage, start.same_run) == (0, 0, new.lineage, True)

    TrainingStates(url).write(10, about(new), content("ten"))
    for resume in (True, "auto", str(tmp_path), url, f"{url}/step-10"):
        start = find_resume_point(resume, url, CONFIG, 8)
        assert (start.step, start.version, start.tasks_consumed, start.steps_without_signal) == (10, 5, 30, 1)
        assert (start.lineage, start.same_run, start.starts_new_lineage) == (new.lineage, True, False)
    assert resume_point_of(TrainingStates(url), 10).evaluation == {"best": None}
    with pytest.raises(ConfigError, match="only those of steps"):
        find_resume_point(f"{url}/step-7", url, CONFIG, 0)


def test_another_learning_rate_begins_another_history_with_versions_of_its_own():
    start = resume_after("u", 10, about(fresh_start()), changed(algorithm__lr=1.0), highest_version=8)
    assert start.starts_new_lineage
    assert start.parent_lineage is not None
    assert start.parent_lineage != start.lineage
    assert start.version > 8 + 1
    assert any("algorithm.lr: 0.0001 -> 1.0" in note for note in start.notes)
    same = resume_after("u", 10, about(fresh_start()), changed(learner__n=4), highest_version=8)
    assert (same.version, same.starts_new_lineage) == (5, False)


def test_a_state_of_another_folder_begins_a_store_of_its_own(tmp_path: Path):
    url = str(tmp_path / "state")
    TrainingStates(url).write(10, about(fresh_start()), content("ten"))
    start = find_resume_point(f"{url}/step-10", str(tmp_path / "mine" / "state"), CONFIG, 0)
    assert (start.same_run, start.starts_new_lineage, start.parent_lineage, start.version) == (
        False,
        True,
        None,
        5,
    )
    assert start.evaluation is None  # the best model is in the other folder
    assert find_resume_point(True, url, CONFIG, 0).evaluation is not None


class Quiet:
    def stage(self, text: str) -> None: ...
    def step(self, step: int, metrics: dict) -> None: ...
    def note(self, text: str) -> None: ...


def test_metrics_go_on_after_the_step_of_the_state(tmp_path: Path):
    first = Report(tmp_path, Quiet(), {}, time.perf_counter() - 100)
    for step in range(6):
        first.step(step, {"x": float("nan") if step == 1 else float(step)})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "x"')  # the run was killed
    (tmp_path / "best").mkdir()
    second = Report(tmp_path, Quiet(), {}, last_logged_step=3)
    second.step(4, {"x": 40.0})
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row["x"] for row in rows] == [0.0, None, 2.0, 3.0, 40.0]
    assert rows[4]["time/total_s"] >= rows[3]["time/total_s"] >= 100
    assert (tmp_path / "best").exists()
    Report(tmp_path, Quiet(), {})
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    assert not (tmp_path / "best").exists()


def test_who_resumes_waits_until_the_store_before_has_let_go(tmp_path: Path):
    from raylight.errors import StoreError
    from raylight.store.journal import Journal
    from raylight.trainer.resume import wait_for_store

    path = tmp_path / "store.db"
    journal = Journal(path)

    async def look() -> None:
        with pytest.raises(StoreError, match="still has"):
            await wait_for_store(path, timeout=0.05)
        waiting = asyncio.create_task(wait_for_store(path, timeout=5))
        await asyncio.sleep(0)
        journal.close()
        await waiting

    asyncio.run(look())
    Journal(path).close()
