"""The store's file: what it refuses, what it survives."""

import asyncio
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from store_helpers import BROKEN, Box, Clock, call_of, conversation_of, ids_of, open_box, reward_of, span_of
from unit_helpers import make_generation, within

from raylight.errors import DiskError, StoreError
from raylight.store.service import StoreService
from raylight.store.tables.journal import VERSION, Journal
from raylight.store.tables.rollouts import CommitEvents

# files that cannot be a journal


def not_a_database(path: Path) -> None:
    path.write_bytes(b"this is a text, and not a short one either" * 100)


def of_another_version(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {VERSION + 1}")


def of_something_else(path: Path) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE users (name TEXT)")


def truncated(path: Path) -> None:
    Journal(path).close()
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (not_a_database, "not a database"),
        (of_another_version, f"schema {VERSION + 1}, not {VERSION}"),
        (of_something_else, "is a database of another program"),
        (truncated, "cannot be used"),
        (Path.mkdir, "cannot be used"),
    ],
)
def test_a_file_that_is_no_journal_is_refused_and_left_alone(tmp_path: Path, make: Any, message: str) -> None:
    path = tmp_path / "s.db"
    make(path)
    before = None if path.is_dir() else path.read_bytes()
    with pytest.raises(StoreError, match=message) as raised:
        StoreService(path)
    assert str(path) in str(raised.value)
    assert path.is_dir() or path.read_bytes() == before


def test_a_path_that_cannot_be_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "s.db", "/proc/s.db", ""):
        with pytest.raises(StoreError, match="cannot be used"):
            StoreService(path)


async def test_a_journal_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with open_box(path) as box:
        await box.take()
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("PRAGMA locking_mode = EXCLUSIVE")
    other.execute("BEGIN EXCLUSIVE")
    with pytest.MonkeyPatch.context() as patch:
        connect = sqlite3.connect
        patch.setattr(
            sqlite3, "connect", lambda *args, **kwargs: connect(*args, **kwargs | {"timeout": 0.01})
        )
        with pytest.raises(StoreError, match="locked"):
            StoreService(path)
    other.close()
    async with open_box(path) as box:
        assert await box.count("total_rollouts") == 1


def test_names_with_a_meaning_for_sqlite_are_files_like_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Journal(":memory:").close()
    assert (tmp_path / ":memory:").exists()


async def test_a_store_without_a_path_leaves_no_file() -> None:
    async with open_box() as box:
        await box.take()
        folder = box.service._journal.path.parent
        assert folder.exists()
    assert not folder.exists()


# a file that fails while it is used


async def fill(box: Box, pages: int = 0) -> None:
    """Let the file grow by no more than some pages."""
    db = box.service._journal.db
    (now,) = db.execute("PRAGMA page_count").fetchone()
    db.execute(f"PRAGMA max_page_count = {now + pages}")


async def test_a_full_disk_is_an_error_and_the_store_goes_on_when_there_is_room_again(tmp_path: Path) -> None:
    async with open_box(tmp_path / "s.db") as box, within():
        rollout = await box.take()
        big = span_of(rollout, attributes={"text": "x" * 1_000_000})
        await fill(box)
        before = await box.counts()
        results = await asyncio.gather(
            box.store.add_span(span_of(rollout)),
            box.store.add_span(big),
            box.store.cancel_rollout(rollout.rollout_id),
            return_exceptions=True,
        )
        assert [type(result) for result in results] == [DiskError] * 3, results
        assert re.search(r"s\.db cannot be written: .* full \(.* are free on its disk\)", str(results[0]))
        with pytest.raises(StoreError, match="full"):
            await box.store.enqueue_rollout("x" * 1_000_000)
        with pytest.raises(StoreError, match="full"):
            await box.store.add_resources({"a": "x" * 1_000_000})
        assert box.service._rollouts.events == CommitEvents(), "no waiter is woken for undone changes"
        assert await box.counts() == before
        assert await box.status(rollout) == ("preparing", "preparing")
        box.service._journal.db.execute("PRAGMA max_page_count = 1000000")
        assert (await box.store.add_span(big)).sequence_id == 1
        assert (await box.store.finish_attempt(rollout, "succeeded")).status == "succeeded"


@pytest.mark.parametrize("moved", [False, True], ids=["removed", "replaced"])
async def test_a_file_that_is_removed_during_the_run_is_an_error(tmp_path: Path, moved: bool) -> None:
    """SQLite itself would continue with the removed file, and lose all that it records."""
    async with open_box(tmp_path / "s.db") as box:
        rollout = await box.take()
        (tmp_path / "s.db").rename(tmp_path / "away.db")
        if moved:
            (tmp_path / "s.db").write_bytes(b"")
        with pytest.raises(DiskError, match=r"s\.db was removed or replaced during the run"):
            await box.store.add_span(span_of(rollout))
        (tmp_path / "away.db").rename(tmp_path / "s.db")
        assert (await box.store.finish_attempt(rollout, "succeeded")).status == "succeeded"


async def test_a_commit_that_fails_does_not_stay_open(tmp_path: Path) -> None:
    async with open_box(tmp_path / "s.db") as box:
        (rollout_id,) = await box.enqueue()
        db = box.service._journal.db
        db.execute("CREATE TABLE t (x REFERENCES rollouts(rollout_id) DEFERRABLE INITIALLY DEFERRED)")
        db.execute("PRAGMA foreign_keys = 1")
        db.execute("CREATE TRIGGER bad AFTER INSERT ON workers BEGIN INSERT INTO t VALUES ('none'); END")
        with pytest.raises(StoreError):
            await box.store.update_worker("w")
        db.execute("DROP TRIGGER bad")
        assert (await box.store.update_worker("w")).worker_id == "w"
        assert (await box.store.update_rollout(rollout_id, mode="val")).mode == "val"


async def test_a_transaction_that_sqlite_undoes_by_itself_is_undone_once(tmp_path: Path) -> None:
    async with open_box(tmp_path / "s.db") as box:
        await box.enqueue()
        journal = box.service._journal
        with pytest.raises(StoreError, match="no such table"), journal.transaction(), journal.savepoint():
            journal.db.execute("ROLLBACK").execute("SELECT * FROM none_such")
        assert (await box.again()).status == "preparing"


async def test_a_file_that_was_damaged_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with open_box(path) as box:
        for _ in range(20):
            rollout = await box.take()
            await box.store.add_span(span_of(rollout, attributes={"x": "y" * 20_000}))
    size = path.stat().st_size
    with path.open("r+b") as file:
        for offset in range(4096 * 2, size - 8, 1000):
            file.seek(offset)
            file.write(b"\xff" * 8)
    with pytest.raises(StoreError, match=r"s\.db cannot be used"):
        StoreService(path)


# recovery


async def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    async with open_box(tmp_path / "s.db", clock) as box:
        update = await box.store.add_resources({"llm": 1})
        running = await box.take(max_attempts=2, retry_condition={"failed"})
        await box.store.finish_attempt(running, "failed", BROKEN)
        running = await box.again()
        key, still_open = call_of(running), call_of(running)
        made = make_generation([1, 2], [3], key=key)
        await box.store.capture([(key, 0.0), (still_open, 1.0)], [(key, made, None)])
        await box.store.add_many_spans([span_of(running), reward_of(running, 0.5)])
        await box.enqueue(3)
        cancelled = await box.store.cancel_rollout((await box.enqueue())[0])
        everything = await everything_in(box)
    async with open_box(tmp_path / "s.db", clock) as box, within():
        assert await everything_in(box) == everything
        assert (await box.store.get_latest_resources()) == update
        assert (await box.store.get_rollout_by_id(cancelled.rollout_id)).status == "cancelled"
        assert await box.store.get_next_span_sequence_id(*ids_of(running)) == 3
        finishing = asyncio.create_task(box.store.finish_attempt(running, "succeeded"))
        await box.store.capture([], [(still_open, None, None)])
        assert (await finishing).status == "succeeded"
        (found,) = await box.store.collect([running.rollout_id])
        assert (found.reward, found.generations) == (0.5, [made])


async def everything_in(box: Box) -> list[Any]:
    rollouts = await box.store.query_rollouts()
    spans = [await box.store.query_spans(rollout.rollout_id) for rollout in rollouts]
    attempts = [await box.store.query_attempts(rollout.rollout_id) for rollout in rollouts]
    found = await box.store.collect([rollout.rollout_id for rollout in rollouts], with_spans=True)
    return [rollouts, spans, attempts, found, await box.store.query_workers(), await box.store.statistics()]


WRITER = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from store_helpers import *
from raylight.store.service import StoreService
from raylight.store.client import StoreClient

async def main():
    store = StoreClient(StoreService({path!r}))
    say = lambda *words: print(*words, flush=True)

    async def produce():
        for i in range(100_000):
            say("resources", (await store.add_resources({{"i": i}})).resources_id)
            requests = [EnqueueRolloutRequest(input=i) for _ in range(5)]
            for rollout in await store.enqueue_many_rollouts(requests):
                say("rollout", rollout.rollout_id)

    async def work(name):
        while True:
            for rollout in await store.dequeue_many_rollouts(limit=2, worker_id=name, timeout=5):
                stored = await store.add_span(span_of(rollout))
                say("span", rollout.rollout_id, stored.span_id)
                for call in conversation_of(rollout):
                    await store.capture([(call.key, call.start_time)], [])
                    await store.capture([], [(call.key, call, None)])
                    say("call", rollout.rollout_id, call.key.call_id)
                await store.finish_attempt(rollout, "succeeded", None, [reward_of(rollout, 1.0)])
                say("done", rollout.rollout_id)

    from raylight.types import EnqueueRolloutRequest
    await asyncio.gather(produce(), *[work(f"w{{i}}") for i in range(4)])

asyncio.run(main())
"""


def kill_a_writer(path: Path, lines: int) -> list[list[str]]:
    """Acknowledged records that a process printed before it was killed."""
    code = textwrap.dedent(WRITER).format(folder=str(Path(__file__).parents[2] / "helpers"), path=str(path))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    said = [process.stdout.readline() for _ in range(lines)]
    process.send_signal(signal.SIGKILL)
    said += process.stdout.readlines()
    process.wait()
    return [line.split() for line in said if line.endswith("\n")]


async def test_what_was_acknowledged_before_a_kill_is_there_once(tmp_path: Path) -> None:
    path, said = tmp_path / "s.db", []
    for lines in (150, 37, 291):  # the same file again and again
        said += await asyncio.to_thread(kill_a_writer, path, lines)
    acknowledged = {
        kind: [line[1:] for line in said if line[0] == kind]
        for kind in ("rollout", "resources", "span", "call", "done")
    }
    assert all(acknowledged.values()), said[-1]
    async with open_box(path) as box:
        rollouts = await box.store.query_rollouts()
        ids = [rollout.rollout_id for rollout in rollouts]
        assert len(set(ids)) == len(ids) == await box.count("total_rollouts")
        assert {rollout_id for (rollout_id,) in acknowledged["rollout"]} <= set(ids)
        resources = [update.resources_id for update in await box.store.query_resources()]
        assert {resources_id for (resources_id,) in acknowledged["resources"]} <= set(resources)
        spans = {rollout_id: await box.store.query_spans(rollout_id) for rollout_id in ids}
        for rollout_id, span_id in acknowledged["span"]:
            assert [span.span_id for span in spans[rollout_id]].count(span_id) == 1
        found = {item.rollout.rollout_id: item for item in await box.store.collect(ids)}
        for item in found.values():  # calls arrive in their order, and each continues the one before
            if n := len(item.generations):
                assert item.generations == conversation_of(item.rollout)[:n]
        for rollout_id, call_id in acknowledged["call"]:
            assert [call.key.call_id for call in found[rollout_id].generations].count(call_id) == 1
        done = {rollout.rollout_id for rollout in rollouts if rollout.status == "succeeded"}
        assert {rollout_id for (rollout_id,) in acknowledged["done"]} <= done
        assert [found.reward for found in await box.store.collect(sorted(done))] == [1.0] * len(done)
        statuses = [rollout.status for rollout in rollouts]
        counts = await box.counts()
        assert {s: statuses.count(s) for s in set(statuses)} == {
            name.removeprefix("rollouts_"): n for name, n in counts.items() if name.startswith("rollouts_")
        }
        await finish_the_rest(box, ids)


async def finish_the_rest(box: Box, ids: list[str]) -> None:
    """The run continues: abandoned rollouts come back, and the oldest waiting one is first."""
    box.clock.now = 9e9  # the writers used the real time
    await box.service.expire()
    waiting = await box.store.query_rollouts(status_in=["queuing"])
    taken = await box.store.dequeue_many_rollouts(limit=10_000)
    assert [rollout.rollout_id for rollout in taken][: len(waiting)] == [
        rollout.rollout_id for rollout in waiting
    ]
    for rollout in taken:
        await box.store.finish_attempt(rollout, "succeeded")
    assert len(await box.store.wait_until_decided(rollout_ids=ids, timeout=0)) == len(ids)


def test_the_configuration_of_the_file_is_what_the_laws_need(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "s.db")
    pragmas = {
        name: journal.db.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("journal_mode", "synchronous", "user_version")
    }
    assert pragmas == {"journal_mode": "wal", "synchronous": 1, "user_version": VERSION}
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        journal.reader.execute("DELETE FROM rollouts")
    assert json.loads(json.dumps(pragmas)) == pragmas
    journal.close()
