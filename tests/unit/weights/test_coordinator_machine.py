"""Property test of the coordinator: any orders, and replicas that join, die, fail, leave or are late.

The clock is set by hand.
"""

import asyncio
import itertools
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from coordinator_helpers import PAYLOAD_REF, Life, Replica, Versions, changed, versions_of
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raylight.errors import WeightSyncError
from raylight.weights.client import CoordinatorClient
from raylight.weights.coordinator import ReplicaCoordinator
from raylight.weights.orders import ReplicaState, Task

KINDS = ["adapter", "adapter", "pin", "pin", "release"]
KINDS += ["sleep", "wake", "wake", "probe"]


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers expire when `now` is set past them."""

    now = 0.0

    def time(self) -> float:
        return self.now


@dataclass
class Giving:
    """A pending order."""

    task: asyncio.Task[Any]
    deadline: float
    kind: str
    version: int = 0
    adapter: str = ""
    up: list[ReplicaState] = field(default_factory=list)
    """The states of the replicas that served when the order ended."""


class CoordinatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = ClockLoop()
        self.replicas: dict[str, Replica] = {}
        self.coordinator = ReplicaCoordinator(kill=self.kill)
        self.client = CoordinatorClient(self.coordinator)
        self.taken: dict[str, Task] = {}
        self.givings: list[Giving] = []
        self.names = itertools.count()
        self.versions = itertools.count(1)
        self.seen = Versions()
        self.dead: list[str] = []

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine, and then everything that can proceed."""

        async def go() -> Any:
            result = await work
            for _ in range(15):
                await asyncio.sleep(0)
            return result

        return self.loop.run_until_complete(go())

    def ask(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        for giving in self.givings:
            giving.task.cancel()
        for call in self.coordinator._calls.values():
            call.cancel()
        self.do(asyncio.sleep(0))
        self.loop.close()

    # replicas

    @initialize()
    def begin(self) -> None:
        self.join()
        self.join()
        self.all_do_what_stands()

    @precondition(lambda self: len(self.replicas) < 4)
    @rule()
    def join(self) -> None:
        replica = Replica(self.coordinator, f"r{next(self.names)}", Life())
        self.do(self.coordinator.subscribe(replica.name, replica.state, [replica.life], replica.name))
        self.replicas[replica.name] = replica

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        _, replica = self.pick(data, lambda r: r.name not in self.taken)
        if replica is not None:
            self.take_next(replica)

    def take_next(self, replica: Replica) -> Task | None:
        """Poll, as far as a poll ends at once."""
        polling = self.loop.create_task(replica.poll())
        self.do(asyncio.sleep(0))
        if not polling.done():
            polling.cancel()
            self.do(asyncio.sleep(0))
            return None
        if task := polling.result():
            self.taken[replica.name] = task
        return task

    @precondition(lambda self: self.taken)
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def carry_out(self, data: st.DataObject, fails: bool) -> None:
        name, replica = self.pick(data, lambda r: r.name in self.taken)
        if replica is None:
            return
        fails = fails and self.taken[name].kind != "serve"
        self.finish(replica, "it does not fit" if fails else None)
        if fails and not replica.state.serves and name in self.replicas:  # it cannot start
            self.kill(name)

    @precondition(lambda self: self.replicas)
    @rule()
    def all_do_what_stands(self) -> None:
        for name, replica in list(self.replicas.items()):
            # a replica may be evicted: one before it executed the order that it failed
            while name in self.replicas and (name in self.taken or self.take_next(replica)):
                self.finish(replica)

    def finish(self, replica: Replica, failure: str | None = None) -> None:
        task = self.taken.pop(replica.name)
        result = [float(task.number)] if task.kind == "probe" else None
        if failure is None:
            expected = changed(replica.state, task, result)
            assert expected != replica.state or task.kind == "probe", "it has done that already"
        self.do(replica.finish(task, failure, result))

    @precondition(lambda self: len(self.replicas) > 1)
    @rule(data=st.data(), how=st.sampled_from(["dies", "leaves"]))
    def go(self, data: st.DataObject, how: str) -> None:
        name, _ = self.pick(data, lambda r: True)
        if how == "dies":
            self.kill(name)
        else:
            del self.replicas[name]
            self.taken.pop(name, None)
            self.do(self.coordinator.leave(name))

    def kill(self, name: str) -> None:
        replica = self.replicas.pop(name)
        self.taken.pop(name, None)
        replica.life.end()
        self.dead.append(name)

    def pick(self, data: st.DataObject, which: Any) -> tuple[str, Any]:
        names = [name for name, replica in self.replicas.items() if which(replica)]
        if not names:
            return "", None
        name = data.draw(st.sampled_from(names))
        return name, self.replicas[name]

    # orders

    @precondition(lambda self: self.replicas and len(self.givings) < 3)
    @rule(
        kind=st.sampled_from(KINDS),
        adapter=st.sampled_from(["x", "y"]),
        timeout=st.sampled_from([3.0, 30.0]),
    )
    def give(self, kind: str, adapter: str, timeout: float) -> None:
        version = next(self.versions) if kind in ("adapter", "pin") else 0
        pin = f"{adapter} of an evaluation"
        call = {
            "adapter": lambda: self.client.publish(version, PAYLOAD_REF, timeout, adapter=adapter),
            "pin": lambda: self.client.pin(pin, version, PAYLOAD_REF, timeout),
            "release": lambda: self.client.release(pin, timeout),
            "sleep": lambda: self.client.sleep(timeout),
            "wake": lambda: self.client.wake(timeout),
            "probe": lambda: self.client.probe([1, 2], timeout),
        }[kind]
        task = self.loop.create_task(call())
        name = pin if kind in ("pin", "release") else adapter
        giving = Giving(task, self.loop.now + timeout, kind, version, name)
        task.add_done_callback(lambda _: giving.up.extend(r.state for r in self.up()))
        self.givings.append(giving)
        self.do(asyncio.sleep(0))

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def turn_the_clock(self, seconds: float) -> None:
        self.loop.now += seconds
        self.do(asyncio.sleep(0))
        if self.coordinator._pending:
            assert not {*self.coordinator._pending.waiting()} & set(self.dead), "the dead are waited for"

    # laws

    @invariant()
    def an_order_ends_well_only_when_all_have_done_it(self) -> None:
        """Only replicas that serve count; one that catches up does not serve yet."""
        for giving in [g for g in self.givings if g.task.done()]:
            self.givings.remove(giving)
            if giving.task.exception():
                assert isinstance(giving.task.exception(), WeightSyncError)
                continue
            for replica in giving.up:
                if giving.kind in ("adapter", "pin"):
                    assert replica.adapters[giving.adapter] >= giving.version
                elif giving.kind == "release":
                    assert giving.adapter not in replica.adapters
                elif giving.kind == "sleep":
                    assert replica.asleep
            if giving.kind == "probe":
                assert all(answer is not None for answer in giving.task.result().values())

    @invariant()
    def no_order_outlives_its_time(self) -> None:
        """It waits for its turn for so long at most, and for the replicas as long from its turn on."""
        pending, waiting = self.coordinator._pending, [g for g in self.givings if not g.task.done()]
        if pending is not None and waiting:
            waiting[0].deadline = pending.issued + pending.order.timeout
        assert not [
            giving for giving in self.givings if self.loop.now > giving.deadline and not giving.task.done()
        ]

    @invariant()
    def what_is_visible_all_have_and_it_never_goes_back(self) -> None:
        versions = versions_of(self.coordinator)
        for name, version in versions.adapters.items():
            assert version >= self.seen.adapters.get(name, 0)
        self.seen = versions
        for replica in self.up():
            for name, version in versions.adapters.items():
                assert replica.state.adapters[name] >= version
            if versions.asleep:
                assert replica.state.asleep

    @invariant()
    def a_joining_replica_gets_all_that_is_visible(self) -> None:
        orders, visible = [*self.coordinator._desired.values()], versions_of(self.coordinator)
        for name, version in visible.adapters.items():
            assert any(order.adapter == name and order.version >= version for order in orders)
        if visible.asleep:
            assert "sleep" in self.coordinator._desired

    @invariant()
    def what_is_not_visible_waits_for_somebody(self) -> None:
        """Desired and completed orders differ only if a replica is late."""
        assert "probe" not in self.coordinator._desired
        for subject, order in self.coordinator._desired.items():
            if self.coordinator._completed.get(subject) is not order:
                replicas = self.coordinator._quorum.values()
                assert not replicas or not all(replica.has_reached(order) for replica in replicas)

    @invariant()
    def orders_are_few(self) -> None:
        assert len({*self.coordinator._desired, *self.coordinator._completed}) <= 5

    def up(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.state.serves]


TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = settings(
    max_examples=max(settings.default.max_examples // 2, 20),
    stateful_step_count=40,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.slow
class TestCoordinatorMachineAtLength(CoordinatorMachine.TestCase):
    settings = settings(TestCoordinatorMachine.settings, max_examples=600)
