"""Machines that a plan is made for: given by the user, or the ones at hand."""

from __future__ import annotations

import bisect
import collections
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from raylight._utils.machine import total_memory
from raylight.errors import ConfigError

MIB, GIB = 2**20, 2**30
ROUNDING = 1e-6
"""Largest error of a sum of fractions of a GPU."""


@dataclass(frozen=True)
class NodeShape:
    """One kind of machine.

    Attributes:
        memory: bytes of host memory.
        gpus: number of GPUs.
        gpu_memory: bytes of one GPU; 0 without GPUs.
    """

    memory: int
    gpus: int = 0
    gpu_memory: int = 0

    def __str__(self) -> str:
        count = f"{self.gpus} GPU{'s'[: self.gpus != 1]}"
        gpus = f"{count} of {self.gpu_memory / GIB:.0f} GiB" if self.gpus else "no GPU"
        return f"machine with {self.memory / GIB:.0f} GiB and {gpus}"


@dataclass(frozen=True)
class ClusterShape:
    """The machines of a cluster."""

    nodes: tuple[NodeShape, ...]

    @property
    def gpus(self) -> int:
        """GPUs of all machines."""
        return sum(node.gpus for node in self.nodes)

    @property
    def gpu_memory(self) -> int:
        """Bytes of the smallest GPU; 0 without GPUs."""
        return min((node.gpu_memory for node in self.nodes if node.gpus), default=0)

    @property
    def memory(self) -> int:
        """Bytes of host memory of all machines."""
        return sum(node.memory for node in self.nodes)

    def __str__(self) -> str:
        kinds = collections.Counter(self.nodes)
        return "; ".join(f"{count} x {node}" for node, count in kinds.items())


def pack_shares(*roles: tuple[int, float]) -> list[float]:
    """Return what processes leave of each GPU that they take. Ray puts a share where the least is left.

    Args:
        roles: number of processes, and the GPUs of each, in the order of their start.
    """
    left: list[float] = []
    for processes, gpus in roles:
        left[:0] = [0.0] * (processes * int(gpus))
        for _ in range(processes if (share := gpus % 1) else 0):
            index = bisect.bisect_left(left, share - ROUNDING)
            bisect.insort(left, (left.pop(index) if index < len(left) else 1) - share)
    return left


def this_machine() -> NodeShape:
    gpus, gpu_memory = _gpus()
    return NodeShape(total_memory(), gpus, gpu_memory)


def given_cluster(
    nodes: int | None, gpus: int | None, gpu_memory: float | None, memory: float | None
) -> ClusterShape:
    """Return a cluster shape; None takes the value of this machine.

    Args:
        nodes: number of machines; None for 1.
        gpus: GPUs of each machine.
        gpu_memory: GiB of each GPU.
        memory: GiB of host memory of each machine.

    Raises:
        ConfigError: there are GPUs, and their memory is unknown.
    """
    here = this_machine()
    node = NodeShape(
        memory=int(memory * GIB) if memory else here.memory,
        gpus=here.gpus if gpus is None else gpus,
        gpu_memory=int(gpu_memory * GIB) if gpu_memory else here.gpu_memory,
    )
    if node.gpus and not node.gpu_memory:
        raise ConfigError("--gpus says how many GPUs a machine has, not how large they are; add --gpu-memory")
    return ClusterShape((node,) * (nodes or 1))


def _gpus() -> tuple[int, int]:
    """Return the number of this machine's GPUs and the memory of the smallest."""
    if not Path("/proc/driver/nvidia").exists():
        return 0, 0
    import torch

    devices: list[Any] = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return len(devices), min((device.total_memory for device in devices), default=0)
