"""Stand-ins for engines and replicas of a coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Generator, Mapping
from typing import Any

from ray.exceptions import OwnerDiedError

from raylight._utils.aio import cancel_all
from raylight.engines.protocol import LoraAdapter, UpdateMode
from raylight.errors import TransferBrokenError, WeightSyncError
from raylight.weight_sync.client import ReplicaClient
from raylight.weight_sync.coordinator import ReplicaCoordinator
from raylight.weight_sync.orders import Order
from raylight.weight_sync.transfer_follower import TransferFollower
from raylight.weight_sync.transfers import PhaseKind

PAYLOAD_REF = ["reference"]
ADAPTER = LoraAdapter({"r": 8}, {})


class SpyEngine:
    """An engine that records its calls. `fails` maps a call to its error; `gate` blocks all calls."""

    kind = "transformers"
    model = "policy"
    workers = 1

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.phases: list[str] = []
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

    async def init_weight_transfer_engine(self, info: Mapping[str, Any]) -> None:
        self.phases.append("init")

    async def start_weight_update(self, mode: str = "keep") -> None:
        self.phases.append("start")
        self._mode = mode

    async def update_weights(self, info: Any) -> None:
        self.phases.append("update")
        await self.gate.wait()
        if "weights" in self.fails:
            raise self.fails["weights"]

    async def finish_weight_update(self, version: int) -> None:
        self.phases.append("finish")
        self.told.append(("weights", version, self._mode))
        self.version = version

    async def abort_weight_update(self) -> None:
        self.phases.append("abort")

    async def load_adapter(self, name: str, version: int, adapter: LoraAdapter, mode: str = "keep") -> None:
        await self._hear("adapter", name, version, adapter, mode)
        self.adapters[name] = version

    async def drop_adapter(self, name: str) -> None:
        await self._hear("drop", name)
        self.adapters.pop(name, None)

    async def logprobs(
        self, ids: list[int], adapter: str | None = None, temperature: float = 1.0
    ) -> list[float]:
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


async def send(coordinator: ReplicaCoordinator, version: int, token: str = "", timeout: float = 60.0) -> None:
    """Send a version, as learners do: again, if replicas are lost meanwhile."""
    while members := await coordinator.begin_transfer(version, token):
        phases: tuple[PhaseKind, ...] = ("init", "start", "update", "finish")
        with contextlib.suppress(TransferBrokenError):
            for phase in phases:
                infos = {member.replica: pickle.dumps(phase) for member in members}
                await coordinator.run_phase(phase, infos, timeout)


async def publish_weights(
    coordinator: ReplicaCoordinator, version: int, timeout: float = 5.0, mode: UpdateMode = "keep"
) -> int:
    """Publish a version, and send it."""
    token = f"publication of {version}"
    sending = asyncio.create_task(send(coordinator, version, token, timeout))
    try:
        return len(await coordinator.publish(version, None, timeout, mode, token=token))
    finally:
        await cancel_all([sending])


async def turns(count: int = 20) -> None:
    """Run the event loop for some turns."""
    for _ in range(count):
        await asyncio.sleep(0)


class Replica:
    """A replica that executes weights orders on a spy engine."""

    def __init__(self, coordinator: ReplicaCoordinator, name: str, engine: SpyEngine | None = None) -> None:
        self.engine, self.life = engine or SpyEngine(), Life()
        self._coordinator, self._name = coordinator, name
        client = ReplicaClient(name, coordinator)
        self._follower = TransferFollower(self.engine, client, lambda call: call())  # type: ignore[arg-type]
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        state = await self._coordinator.subscribe(self._name, [self.life], f"handle of {self._name}")
        await self._coordinator.acknowledge(self._name, state.number)
        self._task = asyncio.create_task(self._run(state.number))

    async def _run(self, after: int) -> None:
        while True:
            for order in await self._coordinator.next(self._name, after, 60.0):
                await self._execute(order)
                after = order.number

    async def _execute(self, order: Order) -> None:
        failure = None
        try:
            if order.version > self.engine.version:
                await self._follower.receive(order)
        except WeightSyncError as error:
            failure = str(error)
        await self._coordinator.acknowledge(self._name, order.number, failure)

    async def die(self) -> None:
        assert self._task
        await cancel_all([self._task])
        self.life.end()


async def replicas_of(coordinator: ReplicaCoordinator, *names: str) -> list[Replica]:
    replicas = [Replica(coordinator, name) for name in names]
    for replica in replicas:
        await replica.start()
    return replicas
