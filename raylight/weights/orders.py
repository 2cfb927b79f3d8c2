"""Messages between the trainer, the coordinator and its replicas: orders, tasks, reports and snapshots."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from raylight.errors import WeightSyncError
from raylight.weights.protocol import EngineLoad, UpdateMode

BoxedRef: TypeAlias = Sequence[Awaitable[object]]
"""One object reference in a list, which Ray passes on in place of its value."""

Kind = Literal["weights", "adapter", "release", "sleep", "wake", "probe"]
UNDOING: frozenset[Kind] = frozenset({"release", "wake"})
"""Orders that end the state which an earlier order of their subject set. They leave none themselves."""
Phase = Literal["init", "start", "update", "finish", "send"]
"""Phases of vLLM's weight transfer, and "send": start, one update and finish in one call."""
FINAL: frozenset[Phase] = frozenset({"finish", "send"})
"""Phases after which a replica has the weights."""


@dataclass(frozen=True)
class ReplicaState:
    """State of a replica's engine, as far as orders change it.

    Attributes:
        weights: version of the weights; 0 is the model as loaded.
        adapters: adapter name to version.
        asleep: True between `sleep` and `wake`.
        awake_reason: reason why the last `sleep` freed no memory; None if it did.
        updating: True from the first phase of a transfer until the last one, or its end.
        serves: True once the replica has caught up with the others.
    """

    weights: int = 0
    adapters: Mapping[str, int] = field(default_factory=dict)
    asleep: bool = False
    awake_reason: str | None = None
    updating: bool = False
    serves: bool = False


@dataclass(frozen=True)
class Order:
    """A state that every replica's engine is to reach, or a probe that each is to answer.

    Adapters travel through Ray's object store: replicas on the publisher's node map the same shared memory,
    each other node gets a copy. Weights are not part of their order, see `coordinator`.

    Attributes:
        timeout: seconds that the trainer waits for all replicas.
        version: version of the weights or the adapter; both share one increasing sequence.
        adapter: name under which an adapter is served, or no longer; for a probe, the adapter to probe.
        payload_ref: one-element list holding a reference to the `LoraAdapter`, for an adapter. Ray does not
            fetch the object of a reference in a list.
        mode: handling of requests in flight.
        level: sleep level.
        ids: token ids of a prompt, of which each replica computes log-probs once it has reached the state.
        token: identifies a publication of weights for its sender.
        pinned: True for an adapter whose version need not be new, because it is published under another name
            too, or together with another adapter.
        number: position in the sequence of the coordinator's orders and tasks, which sets it.
    """

    kind: Kind
    timeout: float
    version: int = 0
    adapter: str | None = None
    payload_ref: BoxedRef | None = None
    mode: UpdateMode = "keep"
    level: int = 1
    ids: tuple[int, ...] = ()
    token: str = ""
    pinned: bool = False
    number: int = 0

    @property
    def subject(self) -> str:
        """The part of an engine's state that the order sets, and a newer order sets again."""
        if self.kind in ("adapter", "release"):
            return f"adapter {self.adapter}"
        return "sleep" if self.kind == "wake" else self.kind

    @property
    def publishes(self) -> bool:
        """True for a new version of the weights or of an adapter."""
        return self.kind in ("weights", "adapter") and not self.pinned

    def is_reached(self, state: ReplicaState) -> bool:
        """Return True if an engine is in the ordered state."""
        return _REACHED[self.kind](self, state)

    def check(self, last_version: int, has_replicas: bool, sleep: Order | None) -> None:
        """Check that the order can be executed now.

        Args:
            last_version: newest version of weights and adapters.
            sleep: newest order to sleep or to wake.

        Raises:
            WeightSyncError: it cannot.
        """
        if self.publishes and self.version <= last_version:
            raise WeightSyncError(
                f"version {self.version} is not newer than {last_version}; versions are never reused"
            )
        if self.kind == "sleep" and self.level != 1:
            raise WeightSyncError(
                f"sleep level {self.level} is not supported: level 2 forgets the weights, and waiting "
                "requests would be sampled from empty weights before new ones arrive; use level 1"
            )
        if not has_replicas:
            raise WeightSyncError(
                "no engine replica has subscribed to the coordinator; check that the serving deployment is up"
            )
        if self.kind in ("weights", "adapter", "probe") and sleep is not None and sleep.kind == "sleep":
            raise WeightSyncError(f"the engines are asleep; wake them before {self}")

    def __str__(self) -> str:
        names: dict[Kind, str] = {
            "weights": f"version {self.version}",
            "adapter": f"version {self.version} of adapter {self.adapter!r}",
            "release": f"the release of adapter {self.adapter!r}",
        }
        return names.get(self.kind, f"the {self.kind} order")


_REACHED: dict[Kind, Callable[[Order, ReplicaState], bool]] = {
    "weights": lambda order, state: state.weights >= order.version,
    "adapter": lambda order, state: state.adapters.get(str(order.adapter), -1) >= order.version,
    "release": lambda order, state: order.adapter not in state.adapters,
    "sleep": lambda order, state: state.asleep,
    "wake": lambda order, state: not state.asleep,
    "probe": lambda order, state: True,
}


@dataclass(frozen=True)
class Task:
    """The next thing that a replica does.

    Attributes:
        kind: of an order, or a phase of a transfer. "abort" leaves a broken transfer; "serve" begins to
            serve: the replica has caught up.
        order: None for "abort" and "serve".
        info: argument of the engine's method for a phase, pickled: a handle of GPU memory imports torch when
            it is unpickled, which a coordinator does without.
    """

    number: int
    kind: Kind | Phase | Literal["abort", "serve"]
    order: Order | None = None
    info: bytes | None = None


@dataclass(frozen=True)
class TaskAnswer:
    """Outcome of a task.

    Attributes:
        failure: reason why the replica failed.
        lost: True if it failed because another process was lost; it may take part in the next transfer.
        result: log-probs, for a probe.
    """

    number: int
    failure: str | None = None
    lost: bool = False
    result: object = None


@dataclass(frozen=True)
class ReplicaReport:
    """A replica's part of a poll.

    Attributes:
        answer: of the last task.
        load: load of the engine; None until it serves.
        waits: True if the coordinator is to respond when there is a task; False if at once and without one.
    """

    state: ReplicaState
    answer: TaskAnswer | None = None
    load: EngineLoad | None = None
    waits: bool = True


@dataclass(frozen=True)
class Member:
    """A replica that takes part in a transfer.

    Attributes:
        workers: number of its processes that receive weights.
        node: network address of its node.
    """

    replica: str
    workers: int
    node: str


@dataclass(frozen=True)
class Snapshot:
    """Coordinator state without the pending order: a restarted coordinator continues from it.

    The pending order's caller repeats it.

    Attributes:
        generation: increases with every change.
        number: number of the last task.
        version: highest version whose publication has ended.
        received: highest version of the weights that any replica has received.
        desired: newest order of each subject.
        completed: newest order of each subject that all live replicas have reached.
        replicas: live replicas with their actor handles.
        evicted: evicted replicas with the reasons.
        ever_subscribed: True once any replica has subscribed.
        lacking: live replicas that are to receive the current weights next, before they serve.
        ended_tokens: tokens of publications that have ended, for their senders.
        holds: tokens of holds of starts, see `Starts`.
        answers: results of the last publication that ended well, by the key of its call, which its caller
            repeats if the answer is lost.
    """

    generation: int = 0
    number: int = 0
    version: int = -1
    received: int = 0
    desired: dict[str, Order] = field(default_factory=dict)
    completed: dict[str, Order] = field(default_factory=dict)
    replicas: dict[str, object] = field(default_factory=dict)
    evicted: dict[str, str] = field(default_factory=dict)
    ever_subscribed: bool = False
    lacking: frozenset[str] = frozenset()
    ended_tokens: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
    answers: dict[str, dict[str, object]] = field(default_factory=dict)


@dataclass
class VersionSequence:
    """The increasing sequence of versions, none of which is used again.

    Attributes:
        last: highest version that was published, or is being published.
        received: highest version of the weights that any replica has received, perhaps after its publication
            had failed. 0 is the model as loaded.
        awaits_repetition: True from a restart of the coordinator, or the failure of a publication, until the
            next one, if it may publish the version again that replicas have received.
    """

    last: int = -1
    received: int = 0
    awaits_repetition: bool = False

    @property
    def used(self) -> int:
        """The highest version that must not be published again."""
        is_known = self.awaits_repetition or not self.received
        return self.last if is_known else max(self.last, self.received)

    def begin(self, version: int) -> None:
        self.last, self.awaits_repetition = version, False

    def fail(self, last: int) -> None:
        """Note that a publication of weights failed, before which `last` was the highest version."""
        self.last, self.awaits_repetition = last, self.received >= self.last

    def note_received(self, version: int) -> None:
        """Note that a replica has received a version of the weights."""
        self.received = max(self.received, version)

    def restore(self, snapshot: Snapshot) -> None:
        self.last, self.awaits_repetition = snapshot.version, True
        self.note_received(snapshot.received)


def withdraw(orders: dict[str, Order], order: Order, before: Order | None) -> None:
    """Replace an order by the one before it, unless a newer one has superseded it."""
    if orders.get(order.subject) is order:
        del orders[order.subject]
        if before is not None:
            orders[order.subject] = before


def next_order(desired: Mapping[str, Order], state: ReplicaState, failed: int) -> Order | None:
    """Return the next order that a replica is to reach; None if it has reached all, or is in a transfer.

    What is no longer ordered comes first: a replica that was away may have missed the order's end.

    Args:
        desired: newest order of each subject.
        failed: number of the last order that the replica failed.
    """
    if state.updating:
        return None
    for adapter in state.adapters:
        if f"adapter {adapter}" not in desired:
            return Order("release", 0.0, adapter=adapter)
    if state.asleep and "sleep" not in desired:
        return Order("wake", 0.0)
    for order in sorted(desired.values(), key=lambda order: order.number):
        if not order.is_reached(state) and failed != order.number:
            return order
    return None
