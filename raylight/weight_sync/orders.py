"""What the replicas are told to do, one order at a time, and what they have when they did.

An order's arrays travel apart from it: its box is a list that holds an object reference, which Ray passes on without fetching.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from raylight.engines.protocol import UpdateMode

Kind = Literal["weights", "adapter", "drop_adapter", "sleep", "wake", "probe"]
PASSING: frozenset[Kind] = frozenset({"drop_adapter", "wake", "probe"})
"""Orders that a replica which starts later has no need of."""


@dataclass(frozen=True)
class Order:
    """One thing that every replica does.

    Attributes:
        number: increases with every order.
        timeout: seconds that the publisher waits for all replicas.
        version: of weights or adapter; they share one increasing sequence.
        adapter: the name under which an adapter is served; for a probe, the adapter to be probed.
        box: holds the reference to a mapping of arrays ("weights") or to an `Adapter` ("adapter").
        level: of sleep.
        ids: of the prompt to be probed.
    """

    number: int
    kind: Kind
    timeout: float
    version: int = 0
    adapter: str | None = None
    box: list[Any] | None = None
    mode: UpdateMode = "keep"
    level: int = 1
    ids: tuple[int, ...] = ()

    @property
    def subject(self) -> str:
        """What it is about. Of the orders about one subject only the newest counts."""
        if self.kind in ("adapter", "drop_adapter"):
            return f"adapter {self.adapter}"
        return "sleep" if self.kind == "wake" else self.kind

    def __str__(self) -> str:
        names: dict[Kind, str] = {
            "weights": f"version {self.version}",
            "adapter": f"version {self.version} of adapter {self.adapter!r}",
            "drop_adapter": f"the dropping of adapter {self.adapter!r}",
        }
        return names.get(self.kind, f"the {self.kind}")


@dataclass(frozen=True)
class State:
    """What a replica that joins does before it serves: the standing orders by number, up to the order `number`."""

    number: int
    orders: list[Order]


@dataclass(frozen=True)
class Versions:
    """What all replicas have.

    Attributes:
        weights: 0 is the model as it was loaded.
        adapters: name to version.
        asleep: the level, or None.
    """

    weights: int = 0
    adapters: dict[str, int] = field(default_factory=dict)
    asleep: int | None = None
