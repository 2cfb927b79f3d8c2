"""Comparison of the memory that roles need with what a cluster has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raylight.trainer.cluster_fit.cluster_shape import GIB, ClusterShape
from raylight.trainer.cluster_fit.placement import PlacedNode, place
from raylight.trainer.cluster_fit.role_memory import RoleMemory

USABLE_DEVICE = 0.95
"""Share of a GPU's memory that fragmentation leaves to use."""


@dataclass(frozen=True)
class Shortage:
    """Memory or GPUs that a run needs and the cluster lacks.

    Attributes:
        what: the kind of memory, such as "GPU memory".
        message: what is needed where, and what there is.
    """

    what: str
    message: str


def find_shortages(
    roles: Sequence[RoleMemory], cluster: ClusterShape, *, at_peak: bool = True, take_turns: bool = False
) -> list[Shortage]:
    """Return what the roles need and the cluster lacks, each once.

    Args:
        at_peak: count what grows with the tokens of a batch or of a cache at its largest; else not at all.
        take_turns: roles that share a GPU free its memory while the other one computes.
    """
    nodes = place(roles, cluster, at_peak)
    found = [
        *_missing_gpus(roles, nodes, cluster),
        *(shortage for node in nodes for shortage in _missing_device_memory(node, at_peak, take_turns)),
        *(shortage for node in nodes for shortage in _missing_host(node, at_peak)),
    ]
    return list(dict.fromkeys(found))


def _missing_gpus(
    roles: Sequence[RoleMemory], nodes: Sequence[PlacedNode], cluster: ClusterShape
) -> Iterator[Shortage]:
    if sum(len(node.roles) for node in nodes) < sum(role.processes for role in roles):
        needed = sum(role.gpus * role.processes for role in roles)
        parts = ", ".join(f"{role.processes} x {role.gpus:g} for {role.role}" for role in roles if role.gpus)
        yield Shortage("GPUs", f"the run needs {needed:g} GPUs ({parts}); there are {cluster.gpus}")


def _missing_device_memory(node: PlacedNode, at_peak: bool, take_turns: bool) -> Iterator[Shortage]:
    usable = USABLE_DEVICE * node.shape.gpu_memory
    for held in node.on_gpus:
        loads = (
            [_turn(held, i, at_peak) for i in range(len(held))]
            if take_turns
            else [(held, sum(role.total("device", growing=at_peak) for role in held))]
        )
        for roles, needed in loads:
            if needed > usable:
                names = " and ".join(role.role for role in roles)
                yield Shortage(
                    "GPU memory",
                    f"{names}: {gib(needed)} on each GPU; of its {gib(node.shape.gpu_memory)}, {gib(usable)} "
                    "can be used",
                )


def _turn(held: Sequence[RoleMemory], index: int, at_peak: bool) -> tuple[list[RoleMemory], int]:
    """Return the roles that take memory of a GPU while one of them computes, and their bytes."""
    role, idle = held[index], [other for i, other in enumerate(held) if i != index and other.idle]
    return [role, *idle], role.total("device", growing=at_peak) + sum(other.idle for other in idle)


def _missing_host(node: PlacedNode, at_peak: bool) -> Iterator[Shortage]:
    needed = node.host(at_peak)
    if needed > node.shape.memory:
        counts = Counter(role.role for role in node.roles)
        parts = " + ".join(f"{count} x {role}" if count > 1 else role for role, count in counts.items())
        yield Shortage(
            "host memory",
            f"the processes of one machine need {gib(needed)} of host memory ({parts}); it has "
            f"{gib(node.shape.memory)}",
        )


def gib(size: float) -> str:
    """Return bytes as text, in GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"
