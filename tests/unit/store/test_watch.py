"""The watch restarts a store that hangs, and only such a store."""

import asyncio

import pytest
from unit_helpers import until, within

from raylight._utils.aio import cancel_all
from raylight.errors import StoreError, StoreLostError
from raylight.store import actor
from raylight.store.actor import StoreWatch


class FrozenStore:
    """A store that responds once it was restarted often enough."""

    def __init__(self, restarts: int) -> None:
        self.restarts = restarts
        self.requests = self.restarted = 0
        self.thawed = asyncio.Event()

    async def request(self) -> float:
        self.requests += 1
        await self.thawed.wait()
        return 1.0

    def restart(self) -> None:
        self.restarted += 1
        if self.restarted == self.restarts:
            self.thawed.set()


async def test_a_store_that_hangs_is_restarted_until_it_responds(monkeypatch) -> None:
    monkeypatch.setattr(actor, "GRACE_S", 0.001)
    store, notes = FrozenStore(restarts=2), []
    watching = StoreWatch(store.request, store.restart, notes.append, patience_s=0.01, interval_s=0.0)
    task = asyncio.create_task(watching.run())
    await until(lambda: store.requests > 3)
    await cancel_all([task])
    assert (store.restarted, watching.restarts) == (2, 2)
    assert notes == [
        "the store did not respond for 0.01 s and is restarted from its file",
        "the store did not respond for 0.02 s and is restarted from its file",
    ]


async def test_a_store_that_the_run_did_not_start_is_waited_for_and_then_an_error(monkeypatch) -> None:
    monkeypatch.setattr(actor, "GRACE_S", 0.001)
    store, notes = FrozenStore(restarts=1), []
    with pytest.raises(StoreError, match=r"did not respond for 0\.02 s, and this run did not start it"):
        async with within():
            await StoreWatch(store.request, None, notes.append, patience_s=0.01).run()
    assert len(notes) == 1


async def test_a_store_that_responds_late_is_not_restarted() -> None:
    store = FrozenStore(restarts=1)
    watching = StoreWatch(store.request, store.restart, print, patience_s=0.001)
    task = asyncio.create_task(watching.run())
    await until(lambda: store.requests == 1)
    asyncio.get_running_loop().call_later(0.02, store.thawed.set)  # within the grace period
    await store.thawed.wait()
    await cancel_all([task])
    assert store.restarted == 0


async def test_the_watch_ends_with_the_actor() -> None:
    async def request() -> float:
        raise StoreLostError("the store actor is gone")

    async with within():
        await StoreWatch(request, lambda: None, print).run()
