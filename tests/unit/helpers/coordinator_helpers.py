"""Stand-ins for engines and replicas of a coordinator."""

import asyncio
import contextlib
import itertools
import pickle
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ray.exceptions import OwnerDiedError

from raylight._utils.aio import cancel_all
from raylight.errors import TransferBrokenError
from raylight.weights.client import CoordinatorClient
from raylight.weights.coordinator import ReplicaCoordinator
from raylight.weights.executor import OrderExecutor
from raylight.weights.orders import Phase, ReplicaReport, ReplicaState, Task, TaskAnswer
from raylight.weights.protocol import LoraAdapter, UpdateMode

PAYLOAD_REF = ["reference"]
_numbers = itertools.count()
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


@dataclass(frozen=True)
class Versions:
    """State that all live replicas have reached; `asleep` is the sleep level, or None while awake."""

    weights: int = 0
    adapters: dict[str, int] = field(default_factory=dict)
    asleep: int | None = None


def versions_of(coordinator: ReplicaCoordinator) -> Versions:
    completed = coordinator.snapshot().completed
    adapters = {str(o.adapter): o.version for o in completed.values() if o.kind == "adapter"}
    weights, sleep = completed.get("weights"), completed.get("sleep")
    return Versions(weights.version if weights else 0, adapters, sleep.level if sleep else None)


class Coordinator(ReplicaCoordinator):
    """A coordinator with a client that issues its orders."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.client = CoordinatorClient(self)

    def versions(self) -> Versions:
        return versions_of(self)


class Replica:
    """A replica without an engine: the test takes its tasks and answers them."""

    def __init__(self, coordinator: ReplicaCoordinator, name: str, life: Life | None = None) -> None:
        self.coordinator, self.name, self.life = coordinator, name, life
        self.state = ReplicaState()
        self.answer: TaskAnswer | None = None

    async def subscribe(self, **facts: Any) -> None:
        liveness_ref = [self.life] if self.life else None
        await self.coordinator.subscribe(
            self.name, self.state, liveness_ref, f"handle of {self.name}", **facts
        )

    async def poll(self, waits: bool = True) -> Task | None:
        answer, self.answer = self.answer, None
        return await self.coordinator.poll(self.name, ReplicaReport(self.state, answer, waits=waits))

    async def next(self) -> Task:
        """Wait for the next task."""
        while (task := await self.poll()) is None:
            pass
        return task

    async def idle(self) -> bool:
        """Return True if there is no task now."""
        task = self.coordinator._next_task(self.name, self.coordinator._quorum[self.name])
        return task is None

    async def finish(self, task: Task, failure: str | None = None, result: Any = None) -> None:
        """Execute a task, or fail it, and report it."""
        self.answer = TaskAnswer(task.number, failure, result=result)
        if failure is None:
            self.state = changed(self.state, task, result)
        await self.poll(waits=False)

    async def do(self, failure: str | None = None, result: Any = None) -> Task:
        """Wait for the next task, and finish it."""
        task = await self.next()
        await self.finish(task, failure, result)
        return task

    async def catch_up(self) -> list[Task]:
        """Finish tasks until the replica serves; return them."""
        tasks = []
        while not self.state.serves:
            tasks.append(await self.do())
        return tasks[:-1]


def changed(state: ReplicaState, task: Task, result: Any = None) -> ReplicaState:
    """Return the state of a replica after a task."""
    order = task.order
    if task.kind == "serve":
        return replace(state, serves=True)
    if task.kind == "abort":
        return replace(state, updating=False)
    name, adapters = str(order.adapter), dict(state.adapters)
    match task.kind:
        case "adapter":
            return replace(state, adapters=adapters | {name: order.version})
        case "release":
            del adapters[name]
            return replace(state, adapters=adapters)
        case "sleep":
            return replace(state, asleep=True, awake_reason=result)
        case "wake":
            return replace(state, asleep=False)
        case "finish" | "send":
            return replace(state, weights=order.version, updating=False)
        case "probe":
            return state
    return replace(state, updating=True)


class RunningReplica:
    """A replica that executes tasks on a spy engine."""

    def __init__(self, coordinator: ReplicaCoordinator, name: str) -> None:
        self.engine, self.life = SpyEngine(), Life()
        self.executor = OrderExecutor(
            name, self.engine, coordinator, self._lost, call_forever=lambda: [self.life], handle=name
        )
        self.task: asyncio.Task[None] | None = None

    async def _lost(self) -> None:
        raise AssertionError("the coordinator was taken for lost")

    async def start(self) -> None:
        await self.executor.catch_up()
        self.task = asyncio.create_task(self.executor.run())

    async def die(self) -> None:
        assert self.task
        await cancel_all([self.task])
        self.life.end()


async def join(coordinator: ReplicaCoordinator, name: str, life: Life | None = None) -> Replica:
    """Subscribe a replica that has no orders to catch up with."""
    replica = Replica(coordinator, name, life)
    await replica.subscribe()
    assert await replica.catch_up() == []
    return replica


async def replicas_of(coordinator: ReplicaCoordinator, *names: str) -> list[Replica]:
    return [await join(coordinator, name) for name in names]


async def send(coordinator: ReplicaCoordinator, version: int, token: str = "", timeout: float = 60.0) -> None:
    """Send a version, as learners do: again, if replicas are lost meanwhile."""
    while members := await coordinator.begin_transfer(version, token):
        phases: tuple[Phase, ...] = ("init", "start", "update", "finish")
        with contextlib.suppress(TransferBrokenError):
            for phase in phases:
                infos = {member.replica: pickle.dumps(phase) for member in members}
                await coordinator.run_phase(phase, infos, timeout)


async def publish_weights(
    coordinator: ReplicaCoordinator, version: int, timeout: float = 5.0, mode: UpdateMode = "keep"
) -> int:
    """Publish a version, and send it."""
    token = f"publication {next(_numbers)} of {version}"
    sending = asyncio.create_task(send(coordinator, version, token, timeout))
    try:
        client = CoordinatorClient(coordinator)
        return len(await client.publish(version, None, timeout, mode, token=token))
    finally:
        await cancel_all([sending])


async def turns(count: int = 20) -> None:
    """Run the event loop for some turns."""
    for _ in range(count):
        await asyncio.sleep(0)
