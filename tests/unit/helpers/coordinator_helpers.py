"""Stand-ins for engines and replicas of a coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from typing import Any

from ray.exceptions import OwnerDiedError

from raylight.engines.protocol import LoraAdapter
from raylight.weight_sync.coordinator import ReplicaCoordinator

PAYLOAD_REF = ["reference"]
ADAPTER = LoraAdapter({"r": 8}, {})


class SpyEngine:
    """An engine that records its calls. `fails` maps a call to its error; `gate` blocks all calls."""

    kind = "transformers"
    model = "policy"

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.fails: dict[str, Exception] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.version = 0
        self.adapters: dict[str, int] = {}
        self.asleep = False

    async def _hear(self, *what: Any) -> None:
        await self.gate.wait()
        if what[0] in self.fails:
            raise self.fails[what[0]]
        self.told.append(what)

    async def load_weights(self, version: int, weights: Mapping[str, Any], mode: str = "keep") -> None:
        await self._hear("weights", version, weights, mode)
        self.version = version

    async def load_adapter(self, name: str, version: int, adapter: LoraAdapter, mode: str = "keep") -> None:
        await self._hear("adapter", name, version, adapter, mode)
        self.adapters[name] = version

    async def drop_adapter(self, name: str) -> None:
        await self._hear("drop", name)
        self.adapters.pop(name, None)

    async def logprobs(self, ids: list[int], adapter: str | None = None) -> list[float]:
        await self._hear("probe", ids, adapter)
        return [-float(i) for i in ids[1:]]

    async def sleep(self, level: int = 1) -> str | None:
        await self._hear("sleep", level)
        self.asleep = True
        return "there is no memory to free"

    async def wake(self) -> None:
        await self._hear("wake")
        self.asleep = False


class Life:
    """Stand-in for the reference of a replica's liveness call: awaiting it raises when the replica dies."""

    def __init__(self, dead: bool = False) -> None:
        self._over = asyncio.Event()
        if dead:
            self.end()

    def end(self) -> None:
        self._over.set()

    def __await__(self) -> Generator[Any, None, None]:
        yield from self._over.wait().__await__()
        raise OwnerDiedError("00", b"", "")


async def join(coordinator: ReplicaCoordinator, name: str, life: Life | None = None) -> None:
    """Subscribe a replica that has no orders to catch up with."""
    state = await coordinator.subscribe(name, [life] if life else None)
    assert state.orders == []
    await coordinator.acknowledge(name, state.number)


async def coordinator_with(*names: str) -> ReplicaCoordinator:
    coordinator = ReplicaCoordinator()
    for name in names:
        await join(coordinator, name)
    return coordinator


async def obey(coordinator: ReplicaCoordinator, name: str, after: int = 0, failure: str | None = None) -> int:
    """Fetch and acknowledge the next orders; returns the last one's number."""
    for order in await coordinator.next(name, after, 60.0):
        await coordinator.acknowledge(name, order.number, failure)
        after = order.number
    return after


async def turns(count: int = 20) -> None:
    """Run the event loop for some turns."""
    for _ in range(count):
        await asyncio.sleep(0)
