"""Images of calls in the store: read as recorded, and stored where they are new."""

import asyncio
import errno
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from image_helpers import make_image
from store_helpers import open_box
from unit_helpers import DEADLINE_S, make_generation, within

from raylight.errors import DiskError, ImageError, StoreError
from raylight.images import folder
from raylight.store.call_rows import CallDeltas, generations_from_rows
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.types import CallKey, Generation, PlacedImage, TokenSets

RED, BLUE = make_image("red"), make_image("blue")
PAD = 7


def call_with(number: int, parts: list[str], routes: bool = False, candidates: bool = False) -> Generation:
    """A call whose prompt has text ("t") and images (their digests)."""
    ids: list[int] = []
    images: list[PlacedImage] = []
    for part in parts:
        if len(part) == 64:
            images.append(PlacedImage(part, len(ids), len(ids) + 20))
        ids += [PAD] * 20 if len(part) == 64 else [ord(letter) for letter in part]
    call = make_generation(ids, [1, 2], key=CallKey("r", "a", f"{number:04}"), start=float(number))
    extra: dict[str, Any] = {}
    if routes:
        extra["routed_experts"] = np.zeros((len(ids) + 1, 2, 2), np.uint8)
    if candidates:
        extra["candidates"] = TokenSets(np.array([2, 1], np.int32), np.array([1, 4, 2], np.int32))
    return replace(call, images=tuple(images), **extra)


def stored(calls: list[Generation]) -> tuple[list[Generation], list[int]]:
    """Return calls as the store returns them, and the bytes of each."""
    deltas, rows = CallDeltas(), []
    for one in calls:
        rollout, attempt, name, base, shared, data, _, _ = deltas.encode(one.key, one, None)
        assert data is not None
        rows.append((name, rollout, attempt, base, shared, data))
    return list(generations_from_rows(rows).values()), [len(row[5]) for row in rows]


parts = st.lists(
    st.sampled_from([RED.sha256, BLUE.sha256, "0" * 64, "text " * 5, "x"]), min_size=1, max_size=8
)


@given(st.lists(st.tuples(parts, st.booleans(), st.booleans()), min_size=1, max_size=6))
def test_calls_come_back_with_their_images(given: list[tuple[list[str], bool, bool]]) -> None:
    calls = [call_with(number, *one) for number, one in enumerate(given)]
    found, _ = stored(calls)
    assert found == calls


def test_a_conversation_stores_an_image_once() -> None:
    turns = [[RED.sha256, "text " * 9] * length for length in range(1, 11)]
    _, sizes = stored([call_with(number, turn) for number, turn in enumerate(turns)])
    assert max(sizes[1:]) - min(sizes[1:]) < 20


async def test_files_are_beside_the_store(tmp_path: Path) -> None:
    service = StoreService(tmp_path / "store.db")
    store = StoreClient(service)
    await store.write_images({RED.sha256: RED.data})
    await store.write_images({RED.sha256: RED.data, BLUE.sha256: BLUE.data})
    assert sorted(path.name for path in (tmp_path / "store-images").iterdir()) == sorted(
        [RED.sha256, BLUE.sha256]
    )
    await service.close()
    reader = StoreService(tmp_path / "store.db", read_only=True)
    store = StoreClient(reader)
    wanted = [BLUE.sha256, RED.sha256, BLUE.sha256]
    assert await store.read_images(wanted) == {RED.sha256: RED.data, BLUE.sha256: BLUE.data}
    with pytest.raises(ImageError, match="no image"):
        await store.read_images(["0" * 64])
    with pytest.raises(StoreError, match="reading only"):
        await store.write_images({})
    await reader.close()


async def test_a_store_is_closed_after_its_last_file(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released = asyncio.Event(), threading.Event()
    loop, write, shutdown = asyncio.get_running_loop(), folder.write_atomic, ThreadPoolExecutor.shutdown

    def write_late(path: Path, content: bytes) -> None:
        loop.call_soon_threadsafe(begun.set)
        assert released.wait(DEADLINE_S)
        write(path, content)
        written.append(path)

    def end(pool: ThreadPoolExecutor, **arguments: Any) -> None:
        released.set()
        shutdown(pool, **arguments)

    monkeypatch.setattr(folder, "write_atomic", write_late)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", end)
    written: list[Path] = []
    service = StoreService()  # in a temporary folder, which is removed with its files
    writing = asyncio.create_task(service.write_images({RED.sha256: RED.data}))
    async with within():
        await begun.wait()
        writing.cancel()  # as a handler is whose client left
        await asyncio.wait([writing])
        await service.close()
    assert [path.name for path in written] == [RED.sha256]
    assert not written[0].parent.exists()


async def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(folder, "write_atomic", fail)
    async with open_box(tmp_path / "store.db") as box:
        with pytest.raises(DiskError):
            await box.store.write_images({RED.sha256: RED.data})
