"""Assignment of a run's processes to the machines and GPUs of a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from raylight.trainer.cluster_fit.cluster_shape import ClusterShape, NodeShape
from raylight.trainer.cluster_fit.role_memory import RoleMemory

ROUNDING = 1e-6
"""Largest error of a sum of fractions of a GPU."""


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
        """Return the GPUs that a process of a role would take; none if there are not enough."""
        share, count = min(role.gpus, 1.0), max(int(role.gpus), 1)
        free = [held for held in self.on_gpus if sum(min(r.gpus, 1.0) for r in held) + share <= 1 + ROUNDING]
        return free[:count] if len(free) >= count else []


def place(roles: Sequence[RoleMemory], cluster: ClusterShape, at_peak: bool) -> list[PlacedNode]:
    """Place all processes: those with GPUs on the first free ones, the others where most memory is left.

    A process for which no GPU is free is left out.
    """
    nodes = [PlacedNode(node, [], [[] for _ in range(node.gpus)]) for node in cluster.nodes]
    for role in (role for role in roles if role.gpus):
        for _ in range(role.processes):
            node = next((node for node in nodes if node.free_gpus(role)), None)
            if node is None:
                break
            for held in node.free_gpus(role):
                held.append(role)
            node.roles.append(role)
    left = [node.shape.memory - node.host(at_peak) for node in nodes]
    for role in (role for role in roles if not role.gpus):
        for _ in range(role.processes):
            index = max(range(len(nodes)), key=left.__getitem__)
            nodes[index].roles.append(role)
            left[index] -= role.total("host", growing=at_peak)
    return nodes
