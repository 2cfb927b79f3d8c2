"""Comparison of the memory that roles need with what a cluster has, and what to change if it does not fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raylight.planning.cluster_shape import GIB, ClusterShape
from raylight.planning.memory import RoleMemory

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
    """Return what the roles need and the cluster lacks. Roles with a fraction of a GPU share one.

    Args:
        at_peak: count what grows with the tokens of a batch or of a cache at its largest; else not at all.
        take_turns: roles that share a GPU free its memory while the other one computes.
    """
    return [
        *_missing_gpus(roles, cluster),
        *_missing_device_memory(roles, cluster, at_peak, take_turns),
        *_missing_host(roles, cluster, at_peak),
    ]


def _missing_gpus(roles: Sequence[RoleMemory], cluster: ClusterShape) -> Iterator[Shortage]:
    needed = sum(role.gpus * role.processes for role in roles)
    if needed > cluster.gpus:
        parts = ", ".join(f"{role.processes} x {role.gpus:g} for {role.role}" for role in roles if role.gpus)
        yield Shortage("GPUs", f"the run needs {needed:g} GPUs ({parts}); there are {cluster.gpus}")


def _missing_device_memory(
    roles: Sequence[RoleMemory], cluster: ClusterShape, at_peak: bool, take_turns: bool
) -> Iterator[Shortage]:
    usable = int(USABLE_DEVICE * cluster.gpu_memory)
    if not usable:
        return
    on_gpus = [role for role in roles if role.gpus]
    shared = [role for role in on_gpus if role.gpus < 1]
    groups = [[role] for role in on_gpus if role.gpus >= 1]
    if take_turns:
        groups += [[role, *(other for other in shared if other is not role)] for role in shared]
    elif shared:
        groups.append(shared)
    for first, *others in groups:
        needed = first.total("device", growing=at_peak)
        needed += sum(
            other.idle if take_turns else other.total("device", growing=at_peak) for other in others
        )
        group = [first, *(other for other in others if not take_turns or other.idle)]
        if needed > usable:
            names = " and ".join(role.role for role in group)
            yield Shortage(
                "GPU memory",
                f"{names}: {gib(needed)} on each GPU; of its {gib(cluster.gpu_memory)}, {gib(usable)} "
                "can be used",
            )


def _missing_host(roles: Sequence[RoleMemory], cluster: ClusterShape, at_peak: bool) -> Iterator[Shortage]:
    """Compare the host memory of all processes with that of all nodes."""
    needed = sum(role.total("host", growing=at_peak) * role.processes for role in roles)
    available = cluster.memory
    if needed > available:
        yield Shortage(
            "host memory", f"all processes need {gib(needed)} of host memory; there are {gib(available)}"
        )


def gib(size: float) -> str:
    """Return bytes as text, in GiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.0f} MiB"
