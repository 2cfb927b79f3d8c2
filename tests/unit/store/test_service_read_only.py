"""Reading a store: next to its writer, after the writer was killed; and at most one writer."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from store_helpers import LEASE_S, Box, open_box, reward_of, span_of
from unit_helpers import within

from raylight.errors import StoreError, UnknownIdError
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.store.tables.journal import Journal
from raylight.types import EnqueueRolloutRequest


async def test_it_sees_what_the_writer_does_meanwhile(tmp_path: Path) -> None:
    async with open_box(tmp_path / "s.db") as box:
        service = StoreService(tmp_path / "s.db", read_only=True)
        reader = StoreClient(service)
        assert await reader.query_rollouts() == []
        rollout = await box.take()
        assert await reader.get_rollout_by_id(rollout.rollout_id) == await box.store.get_rollout_by_id(
            rollout.rollout_id
        )
        update = await box.store.add_resources({"n": 1})
        await box.store.finish_attempt(
            rollout, "succeeded", None, [span_of(rollout), reward_of(rollout, 0.5)]
        )
        for ask in (
            lambda s: s.query_rollouts(),
            lambda s: s.query_workers(),
            lambda s: s.get_worker_by_id("w"),
            lambda s: s.collect([rollout.rollout_id], with_spans=True),
            lambda s: s.get_latest_resources(),
            lambda s: s.get_resources_by_id(update.resources_id),
            lambda s: s.query_attempts(rollout.rollout_id),
            lambda s: s.query_spans(rollout.rollout_id),
            lambda s: s.get_latest_attempt(rollout.rollout_id),
            lambda s: s.query_resources(),
        ):
            found = await ask(reader)
            assert found
            assert found == await ask(box.store)
        with pytest.raises(UnknownIdError):
            await reader.get_rollout_by_id("ro-none")
        await service.close()
        assert (await box.take()).status == "preparing"


async def test_it_does_not_disturb_the_leases(tmp_path: Path) -> None:
    async with open_box(tmp_path / "s.db") as box:
        rollout = await box.take()
        for _ in range(3):
            box.clock.now += LEASE_S / 4
            service = StoreService(tmp_path / "s.db", clock=lambda: 9e9, read_only=True)
            assert (await StoreClient(service).get_rollout_by_id(rollout.rollout_id)).status == "preparing"
            for _ in range(10):
                await asyncio.sleep(0)
            assert service._timer._task is None
            await service.close()
        assert await box.status(rollout) == ("preparing", "preparing")
        assert await box.pass_time(LEASE_S / 4) == 1


async def ask_all(store: StoreClient) -> list[Any]:
    work = [
        store.enqueue_rollout(1),
        store.start_rollout(1),
        store.dequeue_rollout("w"),
        store.dequeue_rollout("w", timeout=60),
        store.dequeue_many_rollouts(limit=0),
        store.update_rollout("ro", mode="val"),
        store.cancel_rollout("ro"),
        store.start_attempt("ro"),
        store.update_worker("w"),
        store.heartbeat("w", {}, []),
        store.release_worker("w", "died"),
        store.add_resources({}),
        store.get_next_span_sequence_id("ro", "at"),
        store.capture([], []),
        store.lease_s(),
        store.wait_until_decided(rollout_ids=["ro"]),
        store.wait_until_decided(rollout_ids=[], timeout=0),
        store._channel.send("wait_for_records", "at", 0),
        store._channel.send("expire"),
        store._channel.send("call", [("finish_attempt", ("ro", "at", {}, [], False, None))]),
        store.enqueue_many_rollouts([EnqueueRolloutRequest(input=1)]),
    ]
    return await asyncio.gather(*work, return_exceptions=True)


async def test_it_does_nothing_but_answer_queries(tmp_path: Path) -> None:
    async with open_box(tmp_path / "s.db") as box:
        await box.store.enqueue_rollout(1, rollout_id="ro")
    service = StoreService(tmp_path / "s.db", read_only=True)
    async with within():
        answers = await ask_all(StoreClient(service))
    assert [str(answer) for answer in answers] == [
        f"the store {tmp_path / 's.db'} was opened for reading only; change it through its own run"
    ] * len(answers)
    assert {type(answer) for answer in answers} == {StoreError}
    assert (await StoreClient(service).get_rollout_by_id("ro")).status == "queuing"
    await service.close()
    with pytest.raises(StoreError, match="is closed"):
        await StoreClient(service).statistics()
    await service.close()


def test_it_makes_no_store_where_there_is_none(tmp_path: Path) -> None:
    for path in (tmp_path / "s.db", None):
        with pytest.raises(StoreError, match="there is no store at"):
            StoreService(path, read_only=True)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "s.db").touch()  # left by a store that was killed as soon as it began
    with pytest.raises(StoreError, match="there is no store at"):
        StoreService(tmp_path / "s.db", read_only=True)
    assert (tmp_path / "s.db").read_bytes() == b""


WRITER = """
import asyncio, sys
sys.path.insert(0, {folder!r})
from store_helpers import *
async def main():
    async with open_box({path!r}) as box:
        for _ in range(30):
            await box.store.finish_attempt(await box.take(), "succeeded")
        await box.take()
        print("ready", flush=True)
        sys.stdin.read()
asyncio.run(main())
"""


@pytest.fixture
def writer(tmp_path: Path) -> Any:
    """Another process that has a store open."""
    code = WRITER.format(folder=str(Path(__file__).parents[1] / "helpers"), path=str(tmp_path / "s.db"))
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONWARNINGS": "ignore"},
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


async def seen(path: Path) -> dict[str, int]:
    service = StoreService(path, read_only=True)
    try:
        statistics = await StoreClient(service).statistics()
        assert statistics.pop("uptime") >= 0
        return statistics
    finally:
        await service.close()


async def test_a_store_that_was_killed_is_read_and_opened(tmp_path: Path, writer: Any) -> None:
    path = tmp_path / "s.db"
    with pytest.raises(StoreError, match="open for writing"):
        StoreService(path)
    with pytest.raises(StoreError, match="open for writing"):
        Journal.discard(path)
    before = await seen(path)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    assert (tmp_path / "s.db-wal").stat().st_size > 0
    assert await seen(path) == before
    assert (before["rollouts_succeeded"], before["rollouts_preparing"]) == (30, 1)
    async with open_box(path) as box:
        assert before.items() <= (await box.store.statistics()).items()


# one that writes


async def one_writes(path: Path, box: Box) -> None:
    for _ in range(2):
        with pytest.raises(
            StoreError, match=r"s\.db open for writing; read it with StoreService\(path, read_only=True\)"
        ):
            StoreService(path)
    assert (await box.take()).status == "preparing"


async def test_a_second_store_that_writes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    async with open_box(path) as box:
        await one_writes(path, box)
    async with open_box(path) as box:
        await one_writes(path, box)
        assert await box.count("total_rollouts") == 2


def sqlite_locks(path: Path) -> int:
    """Locks of SQLite's that this process holds on a file."""
    inode, pid = path.stat().st_ino, os.getpid()
    lines = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
    return sum(
        line[1] == "POSIX" and int(line[4]) == pid and line[5].endswith(f":{inode}")
        for line in lines
        if "->" not in line
    )


async def test_who_is_refused_or_goes_does_not_let_go_of_the_others_locks(tmp_path: Path) -> None:
    """Without the locks, the next one that closes the file removes the log that the others still write."""
    path = tmp_path / "s.db"
    async with open_box(path) as box:
        await box.take()
        assert sqlite_locks(path) > 0
        with pytest.raises(StoreError):
            StoreService(path)
        assert sqlite_locks(path) > 0
        service = StoreService(path, read_only=True)
        assert len(await StoreClient(service).query_rollouts()) == 1
    assert sqlite_locks(path) > 0
    await service.close()
    assert sqlite_locks(path) == 0


# discarding


async def test_discarding(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    Journal.discard(path)
    async with open_box(path) as box:
        await box.take()
        with pytest.raises(StoreError, match="open for writing"):
            Journal.discard(path)
        assert len(await box.store.query_rollouts()) == 1
    Journal.discard(path)
    assert os.listdir(tmp_path) == []
    async with open_box(path) as box:
        assert await box.store.query_rollouts() == []


def test_what_is_no_store_is_not_discarded(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    path.write_text("a text of mine, which is not a store. " * 100)
    with pytest.raises(StoreError, match="not a database"):
        Journal.discard(path)
    assert path.read_text().startswith("a text of mine")
