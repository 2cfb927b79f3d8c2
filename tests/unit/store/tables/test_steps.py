"""Groups of training steps in the store."""

from __future__ import annotations

from pathlib import Path

from store_helpers import open_box

from raylight.config import StoreConfig
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
