"""Requests to scale a run, from the command to its components."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from unit_helpers import until

from raylight.errors import PlacementError
from raylight.runner.scaling import ScaleRequests
from raylight.store.client import StoreClient


class Parts:
    """A component that has room for ten parts and may be slow."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.wanted = size
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def resize(self, n: int) -> None:
        self.wanted = n
        await self.go_on.wait()
        self.size = min(self.wanted, 10)
        if n > 10 and self.wanted == n:
            raise PlacementError("room for ten")


@asynccontextmanager
async def driver(store: StoreClient, notes: list[str], **components: Parts) -> AsyncIterator[None]:
    (watch,) = ScaleRequests("run", store, components, notes.append).watches()
    running = asyncio.create_task(watch)
    try:
        yield
    finally:
        running.cancel()
        await asyncio.wait([running])


async def test_each_component_is_resized_and_the_change_is_reported(store: StoreClient) -> None:
    notes: list[str] = []
    async with driver(store, notes, runners=Parts(2), replicas=Parts(1)):
        assert await store.ask_driver("run", {"runners": 8, "replicas": 1}, timeout=9) == {
            "runners": {"before": 2, "after": 8, "error": None},
            "replicas": {"before": 1, "after": 1, "error": None},
        }
    assert notes == ["scaling from 2 to 8 runners", "scaled from 2 to 8 runners"]


async def test_failures_say_how_far_the_component_got(store: StoreClient) -> None:
    notes: list[str] = []
    async with driver(store, notes, runners=Parts(2)):
        reply = await store.ask_driver("run", {"runners": 12, "replicas": 2}, timeout=9)
    assert reply == {
        "runners": {"before": 2, "after": 10, "error": "PlacementError: room for ten"},
        "replicas": {"error": "run run has no replicas to scale; it has: runners"},
    }
    assert notes[-1] == "scaled from 2 to 10 runners, not to 12: PlacementError: room for ten"


async def test_a_later_request_does_not_wait_for_an_earlier_one(store: StoreClient) -> None:
    runners = Parts(2)
    async with driver(store, [], runners=runners):
        runners.go_on.clear()
        first = asyncio.create_task(store.ask_driver("run", {"runners": 8}, timeout=9))
        await until(lambda: runners.wanted == 8)
        second = asyncio.create_task(store.ask_driver("run", {"runners": 3}, timeout=9))
        await until(lambda: runners.wanted == 3)
        runners.go_on.set()
        for reply in await asyncio.gather(first, second):
            assert reply == {"runners": {"before": 2, "after": 3, "error": None}}
