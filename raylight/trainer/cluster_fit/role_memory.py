"""Memory of each role of a run, in bytes, from the model's sizes. Pure arithmetic.

An item is on the role's device, or in host memory. Without a GPU everything is in host memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

Place = Literal["device", "host"]


@dataclass(frozen=True)
class Item:
    """One part of a process's memory.

    Attributes:
        name: the part, as reports show it.
        size: bytes.
        grows: memory that is taken only as far as a run uses it.
        stays: memory that the process keeps while another one computes on its GPU.
    """

    name: str
    size: int
    place: Place = "device"
    grows: bool = False
    stays: bool = False


@dataclass(frozen=True)
class RoleMemory:
    """Memory of one process of a role at its peak.

    Attributes:
        role: name of the role.
        processes: number of equal processes.
        gpus: GPUs of each process; 0 if it computes on a CPU, a fraction if it shares one.
        items: what the process holds at its peak.
        group: processes that Ray places together.
    """

    role: str
    processes: int
    gpus: float
    items: tuple[Item, ...] = field(default=())
    group: int = 1

    def total(self, place: Place, *, growing: bool = True) -> int:
        """Return the bytes of one process on its device or in host memory.

        Without a GPU everything is in host memory.

        Args:
            growing: count what grows on demand too.
        """
        return sum(
            item.size
            for item in self.items
            if place == (item.place if self.gpus else "host") and (growing or not item.grows)
        )

    @property
    def note(self) -> str:
        """Remark for the report."""
        return ""

    def idle(self, *, growing: bool = True) -> int:
        """Return the bytes of one process on its device while another role computes there.

        Args:
            growing: as for `total`.
        """
        kept = tuple(item for item in self.items if item.stays)
        return replace(self, items=kept).total("device", growing=growing)


@dataclass(frozen=True)
class EngineMemory(RoleMemory):
    """Memory of one worker of an engine's replica.

    Attributes:
        context: tokens of the longest sequence.
        room: tokens for which the key-value cache has room; None if the model caches no tokens.
    """

    context: int = 0
    room: int | None = None

    @property
    def note(self) -> str:
        if self.room is None:
            return ""
        return f"room for {self.room:,} tokens, {self.room / self.context:.1f} sequences of {self.context:,}"
