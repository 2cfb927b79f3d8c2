"""A transfer of weights to replicas: a set of members that execute the sender's phases together.

Laws:

- A phase ends when all members have executed it. It fails as soon as one has failed, left or died: the
  transfer is broken then, its members abort it, and the sender begins another one with those that are left.
- Phases are numbered in one sequence over all transfers, so that a member never executes one twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from raylight.weight_sync.quorum import Subscription

PhaseKind = Literal["init", "start", "update", "finish", "send", "abort", "withdrawn"]
"""Phases of vLLM's protocol, and "send": start, update and finish of a sender that needs one update."""
FINAL: frozenset[PhaseKind] = frozenset({"finish", "send"})
"""Phases after which a member has the weights."""


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
class Phase:
    """An instruction to a member.

    Attributes:
        number: position in the sequence of all phases.
        version: version of the weights.
        info: argument of the engine's method, pickled: a handle of GPU memory imports torch when it is
            unpickled, which a coordinator does without.
    """

    number: int
    kind: PhaseKind
    version: int
    info: bytes | None = None


@dataclass
class Transfer:
    """A transfer in progress.

    Attributes:
        order: number of the order of weights that the members execute.
        members: the members' subscriptions by name.
        started: time at which the phase began.
        answered: members that have executed, or failed, the current phase.
        broken: the reason why it cannot go on; empty if it can.
    """

    version: int
    order: int
    members: dict[str, Subscription]
    number: int = 0
    kind: PhaseKind | None = None
    started: float = 0.0
    infos: Mapping[str, bytes] = field(default_factory=dict)
    answered: set[str] = field(default_factory=set)
    broken: str = ""

    def begin(
        self, kind: PhaseKind, number: int, now: float, infos: Mapping[str, bytes] | None = None
    ) -> None:
        """Begin a phase."""
        self.kind, self.number, self.started = kind, number, now
        self.infos = infos or {}
        self.answered = set()

    def phase_for(self, replica: str, after: int) -> Phase | None:
        """Return the phase that a replica has not yet executed, if there is one."""
        if replica not in self.members or self.kind is None or self.number <= after:
            return None
        return Phase(self.number, self.kind, self.version, self.infos.get(replica))

    def answer(self, replica: str, failure: str | None) -> None:
        """Record that a member has executed the current phase, or failed, which breaks the transfer."""
        if replica in self.members:
            self.answered.add(replica)
            if failure and not self.broken:
                self.broken = f"{replica}: {failure}"

    @property
    def complete(self) -> bool:
        """True if all members have received the weights."""
        return self.kind in FINAL and not self.waiting()

    def waiting(self) -> list[str]:
        """Return the members that have not executed the current phase."""
        return sorted(self.members.keys() - self.answered)
