"""Property test of the coordinator: any orders, and replicas that join, die, fail, leave or are late.

The clock is set by hand.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

from coordinator_helpers import Life
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from raylight.errors import WeightSyncError
from raylight.weight_sync.coordinator import ReplicaCoordinator
from raylight.weight_sync.orders import CatchUp, Order, Versions

KINDS = ["weights", "weights", "adapter", "adapter", "pin", "pin", "release"]
KINDS += ["sleep", "wake", "wake", "probe"]


class ClockLoop(asyncio.SelectorEventLoop):
    """An event loop whose timers expire when `now` is set past them."""

    now = 0.0

    def time(self) -> float:
        return self.now


@dataclass
class Replica:
    """A model of a replica: the orders that it received, and its state."""

    life: Life
    state: CatchUp
    catching_up: bool = True
    taken: list[Order] = field(default_factory=list)
    number: int = 0
    weights: int = 0
    adapters: dict[str | None, int] = field(default_factory=dict)
    asleep: bool = False

    def carry_out(self, order: Order) -> Any:
        match order.kind:
            case "weights":
                assert order.payload_ref == [order.version]
                self.weights = order.version
            case "adapter":
                self.adapters[order.adapter] = order.version
            case "release":
                self.adapters.pop(order.adapter, None)
            case "probe":
                return [float(self.weights)]
            case _:
                self.asleep = order.kind == "sleep"
        return None


@dataclass
class Giving:
    """A pending order."""

    task: asyncio.Task[Any]
    deadline: float
    kind: str
    version: int = 0
    adapter: str | None = None
    up: list[Replica] = field(default_factory=list)
    """The replicas that served when the order ended, in their state at that time."""


class CoordinatorMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = ClockLoop()
        self.replicas: dict[str, Replica] = {}
        self.coordinator = ReplicaCoordinator(kill=self.kill)
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
        name, life = f"r{next(self.names)}", Life()
        state = self.do(self.coordinator.subscribe(name, [life], name))
        self.replicas[name] = Replica(life, state, taken=list(state.orders))

    @precondition(lambda self: self.replicas)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        name, replica = self.pick(data, lambda r: not r.taken)
        if replica is None:
            return
        if replica.catching_up:
            self.say(name, replica, replica.state.number)
            replica.catching_up = False
        else:
            orders = self.do(self.coordinator.next(name, replica.number, 0.0))
            numbers = [order.number for order in orders]
            assert numbers == sorted(set(numbers))
            assert not numbers or numbers[0] > replica.number
            replica.taken = orders

    @precondition(lambda self: self.replicas)
    @rule(data=st.data(), fails=st.sampled_from([False, False, False, True]))
    def carry_out(self, data: st.DataObject, fails: bool) -> None:
        name, replica = self.pick(data, lambda r: bool(r.taken))
        if replica is None:
            return
        order = replica.taken.pop(0)
        if fails and not replica.catching_up:
            self.say(name, replica, order.number, "it does not fit")
        elif not fails:
            result = replica.carry_out(order)
            self.say(name, replica, order.number, result=result)
        else:  # it cannot start
            self.say(name, replica, order.number, "it does not fit")
            if name in self.replicas:  # else evicted
                self.kill(name)

    @precondition(lambda self: self.replicas)
    @rule()
    def all_do_what_stands(self) -> None:
        for name, replica in list(self.replicas.items()):
            if name not in self.replicas:  # evicted: a replica before it executed the order that it failed
                continue
            for order in replica.taken:
                self.say(name, replica, order.number, result=replica.carry_out(order))
            if replica.catching_up:
                self.say(name, replica, replica.state.number)
                replica.catching_up = False
            replica.taken = []
            while orders := self.do(self.coordinator.next(name, replica.number, 0.0)):
                for order in orders:
                    self.say(name, replica, order.number, result=replica.carry_out(order))

    def say(
        self, name: str, replica: Replica, number: int, failure: str | None = None, result: Any = None
    ) -> None:
        replica.number = number
        self.do(self.coordinator.acknowledge(name, number, failure, result))

    @precondition(lambda self: len(self.replicas) > 1)
    @rule(data=st.data(), how=st.sampled_from(["dies", "leaves"]))
    def go(self, data: st.DataObject, how: str) -> None:
        name, _ = self.pick(data, lambda r: True)
        if how == "dies":
            self.kill(name)
        else:
            del self.replicas[name]
            self.do(self.coordinator.leave(name))

    def kill(self, name: str) -> None:
        self.replicas.pop(name).life.end()
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
        version = next(self.versions) if kind in ("weights", "adapter", "pin") else 0
        pin = f"{adapter} of an evaluation"
        call = {
            "weights": lambda: self.coordinator.publish(version, [version], timeout),
            "adapter": lambda: self.coordinator.publish(version, [version], timeout, adapter=adapter),
            "pin": lambda: self.coordinator.pin(pin, version, [version], timeout),
            "release": lambda: self.coordinator.release(pin, timeout),
            "sleep": lambda: self.coordinator.sleep(timeout),
            "wake": lambda: self.coordinator.wake(timeout),
            "probe": lambda: self.coordinator.probe([1, 2], timeout),
        }[kind]
        task = self.loop.create_task(call())
        name = pin if kind in ("pin", "release") else adapter
        giving = Giving(task, self.loop.now + timeout, kind, version, name)
        task.add_done_callback(
            lambda _: giving.up.extend(replace(r, adapters=dict(r.adapters)) for r in self.up())
        )
        self.givings.append(giving)
        self.do(asyncio.sleep(0))

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0]))
    def turn_the_clock(self, seconds: float) -> None:
        self.loop.now += seconds
        self.do(asyncio.sleep(0))
        if self.coordinator._pending:
            number = self.coordinator._pending.order.number
            late = {*self.coordinator._quorum.waiting(number)}
            assert not late & set(self.dead), "the dead are waited for"

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
                if giving.kind == "weights":
                    assert replica.weights >= giving.version
                elif giving.kind in ("adapter", "pin"):
                    assert replica.adapters[giving.adapter] >= giving.version
                elif giving.kind == "release":
                    assert giving.adapter not in replica.adapters
                elif giving.kind == "sleep":
                    assert replica.asleep
            if giving.kind == "probe":
                assert all(answer is not None for answer in giving.task.result().values())

    @invariant()
    def no_order_outlives_its_time(self) -> None:
        assert not [
            giving for giving in self.givings if self.loop.now > giving.deadline and not giving.task.done()
        ]

    @invariant()
    def what_is_visible_all_have_and_it_never_goes_back(self) -> None:
        versions = self.ask(self.coordinator.versions())
        assert versions.weights >= self.seen.weights
        for name, version in versions.adapters.items():
            assert version >= self.seen.adapters.get(name, 0)
        self.seen = versions
        for replica in self.up():
            assert replica.weights >= versions.weights
            for name, version in versions.adapters.items():
                assert replica.adapters[name] >= version
            if versions.asleep:
                assert replica.asleep

    @invariant()
    def who_joins_gets_all_that_is_visible(self) -> None:
        state = self.ask(self.coordinator.subscribe("looks in"))
        newcomer = Replica(Life(), state)
        for order in state.orders:
            newcomer.carry_out(order)
        self.ask(self.coordinator.leave("looks in"))
        assert newcomer.weights >= self.seen.weights
        for name, version in self.seen.adapters.items():
            assert newcomer.adapters.get(name, 0) >= version
        if self.seen.asleep:
            assert newcomer.asleep
        assert [order.number for order in state.orders] == sorted(order.number for order in state.orders)

    @invariant()
    def what_is_not_visible_waits_for_somebody(self) -> None:
        """Current and completed orders differ only if a replica is late; only a pending probe is current.

        A wake order stays current for replicas that still catch up: they may have been told to sleep. So does
        a release.
        """
        assert "probe" not in self.coordinator._current or (
            self.coordinator._pending and self.coordinator._pending.order.kind == "probe"
        )
        for subject, order in self.coordinator._current.items():
            if self.coordinator._completed.get(subject) is not order:
                quorum = self.coordinator._quorum
                is_awaited = order.kind in ("wake", "release") and not quorum.all_responded(order.number)
                assert is_awaited or not quorum.all_executed(order.number)

    @invariant()
    def payloads_are_few(self) -> None:
        kept = {
            id(order.payload_ref)
            for order in [*self.coordinator._current.values(), *self.coordinator._completed.values()]
            if order.payload_ref
        }
        assert len(kept) <= 2 * 5  # what all have and what they are to have: weights, adapters, pins

    def up(self) -> list[Replica]:
        return [replica for replica in self.replicas.values() if not replica.catching_up]


TestCoordinatorMachine = CoordinatorMachine.TestCase
TestCoordinatorMachine.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
