"""Property test of client, keeper, coordinator and replicas under faults, in virtual time.

Any replicas die, freeze, hang, fail or are slow, and the coordinator dies or freezes, at any time.
Every order still ends well, in bounded time, as long as replacements start.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import pickle
import selectors
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coordinator_helpers import ADAPTER, Life
from hypothesis import example, given
from hypothesis import strategies as st
from ray.exceptions import ActorUnavailableError, RayTaskError

from raylight._utils.aio import cancel_all
from raylight.config import EngineConfig
from raylight.errors import CoordinatorUnavailableError, TransferBrokenError, WeightSyncError
from raylight.trainer.components.publication import Publications
from raylight.weights.client import CoordinatorClient, call_coordinator, call_until_answered
from raylight.weights.coordinator import ReplicaCoordinator
from raylight.weights.executor import OrderExecutor
from raylight.weights.protocol import LoraAdapter
from raylight.weights.sender import PublicationSettings

TIMEOUT_S = 120.0
START_S = 20.0
"""Time that a replacement takes to start."""
RESTART_S = 2.0
REPLACEMENT_TIMEOUT_S = 180.0
SERVE_NOTICES_S = 50.0
"""Time after which Serve replaces a frozen replica by itself."""


HANGS_S = 1e6
"""Time above which a call of an engine counts as hanging."""


class JumpSelector(selectors.SelectSelector):
    """A selector that never waits: it sets the loop's clock to the next timer."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if not ready:
            assert timeout is not None, "deadlock: nothing will ever happen again"
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop with a simulated clock."""

    now = 0.0

    def __init__(self) -> None:
        selector = JumpSelector()
        super().__init__(selector)
        selector.loop = self

    def time(self) -> float:
        return self.now


class Engine:
    """An engine that rejects what it has already loaded."""

    workers = 1

    def __init__(self) -> None:
        self.version = 0
        self.adapters: dict[str, int] = {}
        self.asleep = self.updating = False
        self.seconds = 0.01
        self.failures = 0
        """Number of calls that will fail."""

    async def _work(self) -> None:
        await asyncio.sleep(self.seconds)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("the device is lost")

    async def init_weight_transfer_engine(self, info: Mapping[str, Any]) -> None:
        await self._hang()

    async def start_weight_update(self, mode: str = "keep") -> None:
        await self._hang()
        assert not self.updating
        self.updating = True

    async def update_weights(self, info: Any) -> None:
        assert self.updating
        await self._work()

    async def finish_weight_update(self, version: int) -> None:
        await self._hang()
        assert version > self.version, "loaded twice"
        self.version, self.updating = version, False

    async def abort_weight_update(self) -> None:
        await self._hang()
        self.updating = False

    async def _hang(self) -> None:
        await asyncio.sleep(self.seconds if self.seconds > HANGS_S else 0.01)

    async def load_adapter(self, name: str, version: int, adapter: LoraAdapter, mode: str = "keep") -> None:
        assert version > self.adapters.get(name, 0), "loaded twice"
        await self._work()
        self.adapters[name] = version

    async def drop_adapter(self, name: str) -> None:
        await self._work()
        self.adapters.pop(name, None)

    async def logprobs(
        self, ids: list[int], adapter: str | None = None, temperature: float = 1.0
    ) -> list[float]:
        await self._work()
        return [float(self.version)]

    async def sleep(self, level: int = 1) -> str | None:
        await self._work()
        self.asleep = True
        return "a CPU has no device memory"

    async def wake(self) -> None:
        await self._work()
        self.asleep = False


class Learners:
    """The sender of weights. A connection to a hanging engine ends after a while."""

    version = 0

    async def logprobs(self, ids: list[int], model: str = "") -> list[float]:
        return [float(self.version)]

    async def publish_weights(self, version: int, token: str, settings: PublicationSettings) -> None:
        coordinator, within = settings.coordinator, settings.limit_s
        while members := await call_until_answered(
            coordinator, "begin_transfer", version, token, within=within
        ):
            with contextlib.suppress(TransferBrokenError, CoordinatorUnavailableError, TimeoutError):
                for phase in ("init", "start", "update", "finish"):
                    infos = {member.replica: pickle.dumps(phase) for member in members}
                    call = call_coordinator(
                        coordinator, "run_phase", phase, infos, settings.timeout_s, within=within
                    )
                    await asyncio.wait_for(call, settings.timeout_s / 2 if phase == "update" else None)


@dataclass
class Replica:
    """A replica's process. `thaw` is set unless it is frozen."""

    name: str
    engine: Engine = field(default_factory=Engine)
    life: Life = field(default_factory=Life)
    thaw: asyncio.Event = field(default_factory=asyncio.Event)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    serves: bool = False


class Cluster:
    """A coordinator's actor that restarts, and a Serve that replaces replicas."""

    def __init__(self, replicas: int) -> None:
        self.names = itertools.count()
        self.replicas: dict[str, Replica] = {}
        self.tasks: list[asyncio.Task[Any]] = []
        self.up = asyncio.Event()
        self.thaw = asyncio.Event()
        self.calls: set[asyncio.Task[Any]] = set()
        self.kills = 0
        self.coordinator = self.new_coordinator(True)
        for _ in range(replicas):
            self.start_replica(0.0)
        self.client = CoordinatorClient(
            self.handle(None), REPLACEMENT_TIMEOUT_S, lambda message: None, self.restart_coordinator
        )
        engine = EngineConfig(kind="transformers", start_timeout_s=REPLACEMENT_TIMEOUT_S)
        self.learners: Any = Learners()
        self.publications = Publications(
            self.learners, self.client, engine, TIMEOUT_S, probe=[1, 2], tolerance=1e-9
        )
        self.tasks.append(asyncio.create_task(self.client.keep()))
        self.tasks.append(
            asyncio.create_task(self.publications.serve_joined(lambda: self.publications.published))
        )

    # the coordinator's actor

    def new_coordinator(self, restored: bool) -> ReplicaCoordinator:
        self.up.set()
        self.thaw.set()
        return ReplicaCoordinator(None, self.kill_replica, REPLACEMENT_TIMEOUT_S, restored)

    def handle(self, replica: Replica | None) -> Any:
        """Return a handle as a replica's process has it, or as the driver (None) has it."""

        class Method:
            def __init__(handle, name: str) -> None:
                handle.name = name

            async def remote(handle, *args: Any) -> Any:
                return await self.call(replica, handle.name, args)

        class Handle:
            def __getattr__(handle, name: str) -> Any:
                return Method(name)

        return Handle()

    async def call(self, replica: Replica | None, method: str, args: tuple[Any, ...]) -> Any:
        if replica is not None:
            await replica.thaw.wait()
        if not self.up.is_set():
            raise ActorUnavailableError("restarting", None)
        call = asyncio.ensure_future(self.execute(method, args))
        self.calls.add(call)
        try:
            result = await call
        except asyncio.CancelledError:
            if asyncio.current_task().cancelling():  # type: ignore[union-attr]
                raise
            raise ActorUnavailableError("killed", None) from None
        finally:
            self.calls.discard(call)
        if replica is not None:
            await replica.thaw.wait()
        return result

    async def execute(self, method: str, args: tuple[Any, ...]) -> Any:
        await self.thaw.wait()
        try:
            return await getattr(self.coordinator, method)(*args)
        except Exception as error:
            raise RayTaskError(method, "traceback", error).as_instanceof_cause() from None

    def kill_coordinator(self) -> None:
        if self.up.is_set():
            self.kills += 1
            self.up.clear()
            old = self.coordinator
            for name in list(old._quorum):
                old._quorum.remove(name)
            for call in [*self.calls, *old._calls.values()]:
                call.cancel()
            asyncio.get_running_loop().call_later(RESTART_S, self.come_back)

    def come_back(self) -> None:
        self.coordinator = self.new_coordinator(False)

    def restart_coordinator(self, handle: Any) -> None:
        self.kill_coordinator()

    # replicas

    def start_replica(self, delay: float) -> None:
        replica = Replica(f"r{next(self.names)}")
        replica.thaw.set()
        self.replicas[replica.name] = replica
        replica.tasks.append(asyncio.create_task(self.run_replica(replica, delay)))

    async def run_replica(self, replica: Replica, delay: float) -> None:
        await asyncio.sleep(delay)
        executor = OrderExecutor(
            replica.name,
            replica.engine,  # type: ignore[arg-type]
            self.handle(replica),
            self.lost,
            call_forever=lambda: [replica.life],
            handle=replica.name,
            fetch=self.fetch,
        )
        try:
            await executor.catch_up()
            replica.serves = True
            await executor.run()
            executor.check_health()
        except Exception:  # Serve replaces it
            pass
        self.kill_replica(replica.name)

    async def lost(self) -> None:
        raise AssertionError("the coordinator was taken for lost")

    async def fetch(self, payload_ref: list[Any]) -> Any:
        return payload_ref[0]

    def kill_replica(self, name: str) -> None:
        replica = self.replicas.pop(name, None)
        if replica is not None:
            replica.life.end()
            for task in replica.tasks:
                task.cancel()
            self.start_replica(START_S)

    # faults

    def inject(self, fault: str, index: int) -> None:
        loop = asyncio.get_running_loop()
        replica = list(self.replicas.values())[index % len(self.replicas)]
        match fault:
            case "kill replica":
                self.kill_replica(replica.name)
            case "freeze replica":
                replica.thaw.clear()
                replica.engine.seconds = 1e9
                loop.call_later(SERVE_NOTICES_S, self.kill_replica, replica.name)
            case "hang engine":
                replica.engine.seconds = 1e9
            case "slow engine":
                replica.engine.seconds = 30.0
            case "fail engine" if len(self.replicas) > 1:
                replica.engine.failures = 1
            case "kill coordinator":
                self.kill_coordinator()
            case "freeze coordinator":
                self.thaw.clear()


FAULTS = [
    "kill replica",
    "freeze replica",
    "hang engine",
    "slow engine",
    "fail engine",
    "kill coordinator",
    "freeze coordinator",
]
ORDERS = ["weights", "weights", "adapter", "pin", "release", "sleep", "probe"]


async def run_orders(replicas: int, orders: list[str], faults: list[tuple[float, str, int]]) -> None:
    cluster = Cluster(replicas)
    client, versions, loop = cluster.client, itertools.count(1), asyncio.get_running_loop()
    await cluster.coordinator.wait_for_replicas(replicas)
    for when, fault, index in faults:
        loop.call_later(when, cluster.inject, fault, index)
    weights, adapter, pinned = 0, 0, 0
    for order in orders:
        began = loop.time()
        match order:
            case "weights":
                weights = cluster.learners.version = next(versions)
                await cluster.publications.publish(weights)
            case "adapter":
                adapter = next(versions)
                await client.publish(adapter, [ADAPTER], TIMEOUT_S, adapter="x")
            case "pin":
                pinned = next(versions)
                await client.pin("pinned", pinned, [ADAPTER], TIMEOUT_S)
            case "release":
                pinned = 0
                await client.release("pinned", TIMEOUT_S)
            case "sleep":
                assert set((await client.sleep(TIMEOUT_S)).values()) <= {"a CPU has no device memory"}
                await client.wake(TIMEOUT_S)
            case "probe":
                probed = await client.probe([1, 2], TIMEOUT_S)
                assert probed
                assert set(map(tuple, probed.values())) == {(float(weights),)}
        for replica in cluster.replicas.values():
            if replica.serves and replica.thaw.is_set():
                assert replica.engine.version == weights
                assert replica.engine.adapters.get("x", 0) == adapter
                assert replica.engine.adapters.get("pinned", 0) == pinned
                assert not replica.engine.asleep
        assert loop.time() - began <= 4 * (TIMEOUT_S + REPLACEMENT_TIMEOUT_S)
        await asyncio.sleep(5.0)
    assert cluster.client.restarts <= cluster.kills
    await cancel_all([*cluster.tasks, *(task for r in cluster.replicas.values() for task in r.tasks)])


@example(3, ["weights", "sleep", "probe"], [(15.82, "freeze coordinator", 0), (2.31, "hang engine", 0)])
@example(3, ["adapter", "probe", "weights"], [(0.02, "slow engine", 2), (12.86, "hang engine", 0)])
@example(2, ["weights"], [(0.03, "hang engine", 0), (0.03, "fail engine", 1), (0.03, "fail engine", 0)])
@example(1, ["weights", "weights"], [(1.0, "slow engine", 0), (22.72, "hang engine", 0)])
@given(
    replicas=st.integers(1, 3),
    orders=st.lists(st.sampled_from(ORDERS), min_size=1, max_size=4),
    faults=st.lists(
        st.tuples(st.floats(0, 25, width=16), st.sampled_from(FAULTS), st.integers(0, 2)), max_size=3
    ),
)
def test_orders_end_well_whatever_dies_or_freezes(
    replicas: int, orders: list[str], faults: list[tuple[float, str, int]]
) -> None:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        try:
            runner.run(run_orders(replicas, orders, faults))
        except WeightSyncError as error:  # all others were away
            if len(faults) == 1 or "the device is lost" not in str(error):
                raise


def test_an_order_that_waited_for_its_turn_has_its_whole_time() -> None:
    async def probe_twice() -> None:
        cluster = Cluster(2)
        await cluster.coordinator.wait_for_replicas(2)
        slow, other = names = list(cluster.replicas)
        cluster.replicas[slow].engine.seconds = 0.6 * TIMEOUT_S
        probes = [cluster.client.probe([1, 2], TIMEOUT_S) for _ in range(2)]
        assert await asyncio.gather(*probes) == [{slow: [0.0], other: [0.0]}] * 2
        assert list(cluster.replicas) == names  # none was killed for the time that the order had waited
        await cancel_all([*cluster.tasks, *(task for r in cluster.replicas.values() for task in r.tasks)])

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(probe_twice())
