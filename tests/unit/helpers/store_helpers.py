"""A store in this process with a clock that the test controls."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from unit_helpers import make_generation

from raylight.config import StoreConfig
from raylight.semconv import reward_attributes
from raylight.store.client import StoreClient
from raylight.store.service import StoreService
from raylight.store.tables.transitions import FIRST_BACKOFF_S
from raylight.types import Attempt, CallKey, Failure, Generation, Rollout, RolloutConfig, Span

LEASE_S = 60.0
LOST = Failure(kind="infrastructure", error="ConnectionError: gone")
BROKEN = Failure(kind="agent", error="ValueError: no")

_numbers = itertools.count()


@dataclass
class Clock:
    """Time of the day; what it is set forward or back by is not lived."""

    now: float = 1000.0
    set_by: float = 0.0

    def __call__(self) -> float:
        return self.now

    def lived(self) -> float:
        return self.now - self.set_by

    def jump(self, seconds: float) -> None:
        self.now += seconds
        self.set_by += seconds


@dataclass
class Box:
    """A store with shortcuts for tests."""

    store: StoreClient
    service: StoreService
    clock: Clock = field(default_factory=Clock)

    async def enqueue(self, n: int = 1, **config: Any) -> list[str]:
        return [
            (await self.store.enqueue_rollout(i, config=RolloutConfig(**config))).rollout_id for i in range(n)
        ]

    async def take(self, worker_id: str | None = "w", **config: Any) -> Rollout:
        """Enqueue a rollout and dequeue it."""
        await self.enqueue(**config)
        return await self.again(worker_id)

    async def again(self, worker_id: str | None = "w") -> Rollout:
        rollout = await self.store.dequeue_rollout(worker_id)
        for _ in range(16):  # it may be held back after a loss
            if rollout is None:
                await self.pass_time(FIRST_BACKOFF_S)
                rollout = await self.store.dequeue_rollout(worker_id)
        assert rollout is not None, "nothing waits"
        assert rollout.attempt is not None
        return rollout

    async def pass_time(self, seconds: float) -> int:
        """Advance the clock and expire attempts, as the timer would."""
        self.clock.now += seconds
        return await self.service.expire()

    async def status(self, rollout: Rollout | str) -> tuple[str, str | None]:
        """Return the status of a rollout and of its latest attempt."""
        found = await self.store.get_rollout_by_id(
            rollout if isinstance(rollout, str) else rollout.rollout_id
        )
        return found.status, found.attempt.status if found.attempt else None

    async def attempt(self, rollout: Rollout, sequence_id: int = 1) -> Attempt:
        return (await self.store.query_attempts(rollout.rollout_id))[sequence_id - 1]

    async def counts(self) -> dict[str, int]:
        """Return the counters that are not 0."""
        statistics = await self.store.statistics()
        return {key: n for key, n in statistics.items() if n and key not in ("name", "uptime")}

    async def count(self, name: str) -> int:
        return (await self.store.statistics()).get(name, 0)


@asynccontextmanager
async def open_box(path: Path | None = None, clock: Clock | None = None, **config: Any) -> AsyncIterator[Box]:
    """Yield a store, and close it at the end."""
    clock = clock or Clock()
    service = StoreService(path, StoreConfig(**({"lease_s": LEASE_S} | config)), clock, clock.lived)
    try:
        yield Box(StoreClient(service), service, clock)
    finally:
        await service.close()


def ids_of(rollout: Rollout) -> tuple[str, str]:
    return rollout.rollout_id, rollout.attempt.attempt_id


def span_of(rollout: Rollout, name: str = "step", **fields: Any) -> Span:
    rollout_id, attempt_id = ids_of(rollout)
    given = {"span_id": f"{next(_numbers):016x}", "attributes": {}} | fields
    return Span.from_attributes(name=name, rollout_id=rollout_id, attempt_id=attempt_id, **given)


def reward_of(rollout: Rollout, value: float) -> Span:
    return span_of(rollout, "agentlightning.annotation", attributes=reward_attributes({"primary": value}))


def call_of(rollout: Rollout, call_id: str | None = None) -> CallKey:
    return CallKey(*ids_of(rollout), call_id or f"call-{next(_numbers)}")


def conversation_of(rollout: Rollout) -> list[Generation]:
    """Return the calls of a rollout, each of which continues the previous one."""
    calls, tokens = [], list(range(rollout.input % 50 + 20))
    for turn in range(4):
        key = call_of(rollout, f"call-{turn}")
        calls.append(make_generation(tokens, [turn] * 20, key=key, start=float(turn)))
        tokens = [*tokens, *[turn] * 20, 7, 8]
    return calls


async def begun(work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
    """Start a task and run it until it waits."""
    task = asyncio.create_task(work)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not task.done(), f"it did not wait: {task}"
    return task
