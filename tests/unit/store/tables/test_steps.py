"""Groups of training steps in the store."""

import errno
import os
from pathlib import Path

import pytest
from store_helpers import open_box

from raylight.config import StoreConfig
from raylight.errors import DiskError
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.types import StepGroups


async def test_what_was_recorded_first_stays() -> None:
    first, second = StepGroups((0, 2), (1,)), StepGroups((3, 4))
    async with open_box() as box:
        assert await box.store.query_steps("a") == {}
        assert await box.store.record_step("a", 1, first) == first
        assert await box.store.record_step("a", 1, second) == first
        assert await box.store.record_step("a", 10, second) == second
        assert await box.store.record_step("b", 1, second) == second
        assert await box.store.query_steps("a") == {1: first, 10: second}


async def test_steps_survive_the_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    for _ in range(2):
        service = StoreService(path, StoreConfig())
        await StoreClient(service).record_step("a", 1, StepGroups((5,)))
        assert await StoreClient(service).query_steps("a") == {1: StepGroups((5,))}
        await service.close()


async def test_a_step_is_recorded_once_all_commits_are_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss after its training state is saved must not lose what it trains on."""
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    service = StoreService(tmp_path / "store.db", StoreConfig())
    store = StoreClient(service)
    await store.start_rollout("task")
    assert synced == []
    await store.record_step("a", 1, StepGroups((0,)))
    assert synced == [f"{tmp_path}/store.db-wal"]

    def fail(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(DiskError, match=r"store\.db"):
        await store.record_step("a", 2, StepGroups((1,)))
    await service.close()
