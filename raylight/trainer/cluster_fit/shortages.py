"""Comparison of the memory that roles need with what a cluster has, where their processes are placed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from raylight.trainer.cluster_fit.cluster_shape import GIB, ROUNDING, ClusterShape, NodeShape, pack_shares
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


@dataclass
class PlacedNode:
    """A machine with the roles of its processes, one entry for each.

    Attributes:
        on_gpus: roles of the processes on each GPU.
    """

    shape: NodeShape
    roles: list[RoleMemory] = field(default_factory=list)
    on_gpus: list[list[RoleMemory]] = field(default_factory=list)

    def host(self, at_peak: bool) -> int:
        """Return the host memory of all processes."""
        counts = Counter(self.roles)
        return sum(role.total("host", growing=at_peak) * count for role, count in counts.items())

    def free_gpus(self, role: RoleMemory) -> list[list[RoleMemory]]:
        """Return the GPUs that a process of a role would take, as Ray chooses them: those where the least is
        left; none if there are not enough."""
        share, count = min(role.gpus, 1.0), max(int(role.gpus), 1)
        free = [held for held in self.on_gpus if _taken(held) + share <= 1 + ROUNDING]
        return sorted(free, key=_taken, reverse=True)[:count] if len(free) >= count else []

    def free(self) -> float:
        """Return the GPUs that no role takes."""
        return len(self.on_gpus) - sum(map(_taken, self.on_gpus))


def _taken(held: Sequence[RoleMemory]) -> float:
    """Return the share of a GPU that roles take."""
    return sum(min(role.gpus, 1.0) for role in held)


def place(roles: Sequence[RoleMemory], cluster: ClusterShape, at_peak: bool) -> list[PlacedNode]:
    """Place all processes: those with GPUs as Ray places them, the others where most memory is left.

    Ray places the roles in the order of their start. A placement group begins on the machine with most free
    GPUs and fills it. A process for which no GPU is free is left out.
    """
    nodes = [PlacedNode(node, [], [[] for _ in range(node.gpus)]) for node in cluster.nodes]
    for role in (role for role in roles if role.gpus):
        node = nodes[0]
        for index in range(role.processes):
            if index % role.group == 0 or not node.free_gpus(role):
                node = max(nodes, key=lambda node: (bool(node.free_gpus(role)), node.free()))
            if not (free := node.free_gpus(role)):
                break
            for held in free:
                held.append(role)
            node.roles.append(role)
    left = [node.shape.memory - node.host(at_peak) for node in nodes]
    for role in (role for role in roles if not role.gpus):
        for _ in range(role.processes):
            index = max(range(len(nodes)), key=left.__getitem__)
            nodes[index].roles.append(role)
            left[index] -= role.total("host", growing=at_peak)
    return nodes


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
        needed = len(pack_shares(*((role.processes, role.gpus) for role in roles)))
        parts = ", ".join(f"{role.processes} x {role.gpus:g} for {role.role}" for role in roles if role.gpus)
        order = ", on which Ray cannot place them in this order" if needed <= cluster.gpus else ""
        yield Shortage("GPUs", f"the run needs {needed} GPUs ({parts}); there are {cluster.gpus}{order}")


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
    role, idle = held[index], {i: other.idle(growing=at_peak) for i, other in enumerate(held) if i != index}
    needed = role.total("device", growing=at_peak) + sum(idle.values())
    return [role, *(held[i] for i, size in idle.items() if size)], needed


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
