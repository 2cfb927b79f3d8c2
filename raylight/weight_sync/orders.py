"""Orders from the coordinator to the replicas, and the state that results from them.

An adapter's arrays travel separately: the order's `payload_ref` is a list that holds an object reference,
which Ray passes on without fetching it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from raylight.engines.protocol import UpdateMode

Kind = Literal["weights", "adapter", "release", "sleep", "wake", "probe"]
TRANSIENT: frozenset[Kind] = frozenset({"release", "wake", "probe"})
"""Orders that a replica which joins later need not execute: they leave no state."""


@dataclass(frozen=True)
class Order:
    """An instruction that every replica executes.

    Attributes:
        number: position in the sequence of all orders, increasing.
        timeout: seconds that the publisher waits for all replicas.
        version: version of the weights or the adapter; both share one increasing sequence.
        adapter: name under which an adapter is served, or no longer; for a probe, the adapter to probe.
        payload_ref: one-element list holding a reference to a `LoraAdapter`, for an adapter. Weights travel
            otherwise, see `transfers`.
        level: sleep level.
        ids: token ids of the prompt to probe, for a probe, or after weights or an adapter were loaded.
    """

    number: int
    kind: Kind
    timeout: float
    version: int = 0
    adapter: str | None = None
    payload_ref: list[Any] | None = None
    mode: UpdateMode = "keep"
    level: int = 1
    ids: tuple[int, ...] = ()

    @property
    def subject(self) -> str:
        """The part of an engine's state that the order sets.

        A newer order supersedes older ones of the same subject.
        """
        if self.kind in ("adapter", "release"):
            return f"adapter {self.adapter}"
        return "sleep" if self.kind == "wake" else self.kind

    def __str__(self) -> str:
        names: dict[Kind, str] = {
            "weights": f"version {self.version}",
            "adapter": f"version {self.version} of adapter {self.adapter!r}",
            "release": f"the release of adapter {self.adapter!r}",
        }
        return names.get(self.kind, f"the {self.kind} order")


@dataclass(frozen=True)
class CatchUp:
    """Orders that a joining replica executes before it serves.

    Attributes:
        number: number of the newest order, which the replica acknowledges when it has executed `orders`.
        orders: current orders by increasing number.
    """

    number: int
    orders: list[Order]


@dataclass(frozen=True)
class Versions:
    """State that all live replicas have reached.

    Attributes:
        weights: version of the weights; 0 is the model as it was loaded.
        adapters: adapter name to version.
        asleep: sleep level, or None while awake.
    """

    weights: int = 0
    adapters: dict[str, int] = field(default_factory=dict)
    asleep: int | None = None


@dataclass(frozen=True)
class Snapshot:
    """Coordinator state without the pending order: a restarted coordinator continues from it.

    The pending order's caller repeats it.

    Attributes:
        generation: increases with every change.
        number: number of the last order.
        version: highest version whose publication has ended.
        current: newest order of each subject.
        completed: newest order of each subject that all live replicas have executed.
        replicas: live replicas with their actor handles.
        evicted: evicted replicas with the reasons.
        ever_subscribed: True once any replica has subscribed.
        lacking: live replicas that lack the current weights, and serve only when they have received them.
        received: highest version of the weights that any replica has received.
        ended_tokens: tokens of publications that have ended, for their senders.
        holds: tokens of holds of starts, see `Starts`.
    """

    generation: int = 0
    number: int = 0
    version: int = -1
    current: dict[str, Order] = field(default_factory=dict)
    completed: dict[str, Order] = field(default_factory=dict)
    replicas: dict[str, Any] = field(default_factory=dict)
    evicted: dict[str, str] = field(default_factory=dict)
    ever_subscribed: bool = False
    lacking: frozenset[str] = frozenset()
    received: int = 0
    ended_tokens: tuple[str, ...] = ()
    holds: tuple[str, ...] = ()
