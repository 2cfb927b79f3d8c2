"""A local Ray cluster: its start, patient on a busy machine, and connections to it from this machine only."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.node as ray_node
import ray._private.ray_constants as ray_constants
from ray._common.utils import get_default_ray_temp_dir
from ray._private.authentication.authentication_token_generator import generate_new_authentication_token
from ray._private.parameter import RayParams
from ray._private.services import get_node_ip_address
from ray._raylet import (  # type: ignore[attr-defined]  # a compiled module
    AuthenticationTokenLoader,
    get_port_filename,
    persist_port,
)

from raylight._utils.machine import available_cpus, check_start, write_problem
from raylight._utils.no_proxy import is_loopback
from raylight.errors import ClusterStartError, summarize_ray_error
from raylight.ray_metrics.table import BOARD
from raylight.trainer.ray_session.blocking import ignored_interrupts
from raylight.types import JsonObject

logger = logging.getLogger(__name__)

START_TIMES = {
    "gcs_server_port_wait_time_s": 1,
    "py_gcs_connect_timeout_s": 1,
    "gcs_rpc_server_connect_timeout_s": 1,
    "raylet_start_wait_time_s": 1,
    "agent_register_timeout_ms": 1000,
    "worker_register_timeout_seconds": 1,
}
"""Ray's settings `RAY_<name>` that limit a step of its start, with their unit as parts of a second. Their
defaults, 10 to 60 s, are too short for a busy machine."""
RAYLET_WAIT_VARIABLE = "RAY_raylet_start_wait_time_s"
BOARDS_VARIABLE = "RAY_METRICS_GRAFANA_DASHBOARD_OUTPUT_DIR"
"""Ray's variable for the folder of Grafana's boards."""
RAY_AGENT_PORTS = (
    "metrics_agent_port",
    "metrics_export_port",
    "dashboard_agent_listen_port",
    "runtime_env_agent_port",
)
"""Ray's names for the ports of its agents, for its parameters and for its files."""
RAY_AGENT_PORT_RANGE = range(20_000, 30_000)
"""Ports that neither the system nor Ray gives to others by itself."""
PORT_TRIES = 1000
NO_PORT = -1
"""Written by an agent in place of a port that it does not have."""
RAY_AGENT_FAILURES = ("Timed out waiting for file", "because one Ray agent failed")
"""Texts in the log of a raylet that ended because an agent was late, or ended without its port."""
START_ATTEMPTS = 3
MIN_CPUS = 2
"""Fewest CPUs of a local cluster, which Ray only counts: the parts of a run ask for more than one in all."""
END_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 2.0
POLL_S = 0.05


def start_local_cluster(timeout_s: float, log_to_driver: bool = True, **options: object) -> None:
    """Start a Ray cluster that ends with this process, and connect to it.

    All its ports are bound to the loopback interface, unless RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER, Ray's switch
    for that, is set. A start that failed because of one of Ray's agents is repeated.

    Args:
        timeout_s: seconds for each step of the start. A variable RAY_... of the user takes precedence.
        log_to_driver: print the output of actors here.
        options: further arguments of `ray.init`.

    Raises:
        ClusterStartError: Ray cannot start here, did not start, or not in time.
    """
    check_start(get_default_ray_temp_dir())
    ensure_token()
    options = {"num_cpus": max(available_cpus(), MIN_CPUS)} | options
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            _start(timeout_s, log_to_driver, options)
            return
        except RayAgentError as error:
            if attempt == START_ATTEMPTS:
                raise ClusterStartError(f"{error} ({attempt} attempts)") from None
            logger.warning("%s. Starting it again, attempt %d of %d", error, attempt + 1, START_ATTEMPTS)


def _start(timeout_s: float, log_to_driver: bool, options: JsonObject) -> None:
    before, began = _children(), time.monotonic()
    nodes: list[_LocalNode] = []
    try:
        with _start_settings(timeout_s, log_to_driver, nodes):
            ray.init(address="local", include_dashboard=True, log_to_driver=log_to_driver, **options)
    except BaseException as error:
        with ignored_interrupts("Ray is being shut down"):
            end_processes(_children() - before)
            ray.shutdown()
            end_processes({agent for node in nodes for agent in node.find_agents()})
        if not isinstance(error, Exception):
            raise
        logs = nodes[0].logs if nodes else get_default_ray_temp_dir()
        by_agent = isinstance(error, RayAgentError) or is_ray_agent_failure(_raylet_log(logs))
        kind = RayAgentError if by_agent else ClusterStartError
        raise kind(_describe(error, time.monotonic() - began, timeout_s, logs)) from None


def ensure_token() -> None:
    """Make a token for the cluster that this process starts if Ray cannot save one in the home folder.

    Programs that this process starts inherit it.
    """
    loader = AuthenticationTokenLoader.instance()
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or loader.has_token(ignore_auth_mode=True):
        return
    if problem := write_problem(Path("~/.ray").expanduser()):
        os.environ["RAY_AUTH_TOKEN"] = generate_new_authentication_token()
        loader.reset_cache()
        logger.warning(
            "the home folder cannot be written (%s), so the token of this Ray cluster is not saved: other "
            "programs, such as `ray status`, cannot join it. Set HOME to one that can, or RAY_AUTH_TOKEN",
            problem,
        )


class RayAgentError(Exception):
    """A start of Ray that failed because an agent of it was late, or did not get its port."""


def is_ray_agent_failure(raylet_log: str) -> bool:
    """Return True if a raylet's log says that it ended because of one of Ray's agents."""
    return any(text in raylet_log for text in RAY_AGENT_FAILURES)


def _raylet_log(logs: str) -> str:
    with contextlib.suppress(OSError):
        return Path(logs, "raylet.out").read_text(errors="replace")
    return ""


@contextlib.contextmanager
def _start_settings(timeout_s: float, log_to_driver: bool, created: list[_LocalNode]) -> Iterator[None]:
    """Set the times, the interface and the node of Ray's start. Ray's processes inherit the first two as
    variables.

    Args:
        created: receives the node.
    """
    constants: dict[str, object] = {}
    if "RAY_DASHBOARD_STARTUP_TIMEOUT_S" not in os.environ:
        constants["RAY_DASHBOARD_STARTUP_TIMEOUT_S"] = timeout_s
    if ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR not in os.environ:
        constants["ENABLE_RAY_CLUSTER"] = False
    variables = {f"RAY_{name}": str(round(timeout_s * unit)) for name, unit in START_TIMES.items()}
    variables[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for jobs, and programs that an agent starts
    # Ray's 15 leaves a run 1/28 of the time that other work of the machine gets
    variables["RAY_worker_niceness"] = "0"
    added = {name: value for name, value in variables.items() if name not in os.environ}
    previous = {name: getattr(ray_constants, name) for name in constants}
    nodes: Any = ray_node
    node = nodes.Node
    nodes.Node = functools.partial(_LocalNode, created, log_to_driver)
    os.environ.update(added)
    for name, value in constants.items():
        setattr(ray_constants, name, value)
    try:
        yield
    finally:
        nodes.Node = node
        for name, value in previous.items():
            setattr(ray_constants, name, value)
        for name in added:
            os.environ.pop(name, None)


@dataclass(frozen=True)
class _RayAgentPort:
    """A port chosen for one of Ray's agents, which replaces the file once it has its port, or has none."""

    name: str
    number: int
    file: Path
    inode: int

    def is_decided(self) -> bool:
        return self.file.stat().st_ino != self.inode

    def check(self) -> None:
        """Raise a RayAgentError if the agent does without its port."""
        found = int(self.file.read_text())
        if found == NO_PORT and self.name == "metrics_export_port":
            return  # Ray's metrics are switched off
        if found != self.number:
            raise RayAgentError(
                f"port {self.number}, chosen for one of its agents ({self.name}), was taken meanwhile, or "
                "the agent's server did not start (dashboard_agent.log)"
            )


class _LocalNode(ray_node.Node):
    """Ray's node, which starts the dashboard and the raylet at the same time, is as patient with Ray's agents
    as with the rest, and notices a raylet that ends.

    Args:
        created: receives this node before it starts anything.
        log_monitor: start Ray's log monitor, which only sends the output of actors to the driver.
    """

    _dashboard: JsonObject | None = None

    def __init__(
        self, created: list[_LocalNode], log_monitor: bool, ray_params: RayParams, **options: Any
    ) -> None:
        created.append(self)
        ray_params.include_log_monitor = log_monitor  # type: ignore[assignment]  # Ray gives its type as str
        super().__init__(ray_params, **options)

    @property
    def logs(self) -> str:
        """The folder of this session's logs; Ray's folder before there is one."""
        return getattr(self, "_logs_dir", None) or get_default_ray_temp_dir()

    def start_api_server(self, **options: object) -> None:
        self._dashboard = options

    def start_ray_processes(self) -> None:
        ports = self._announce_agents()
        super().start_ray_processes()
        if self._dashboard is not None:
            with self._grafana_boards():
                super().start_api_server(**self._dashboard)
        self._wait_for(self._is_registered, "raylet")
        self._wait_for(lambda: all(port.is_decided() for port in ports), "agents")
        for port in ports:
            port.check()

    def _announce_agents(self) -> list[_RayAgentPort]:
        """Choose the ports of Ray's agents, and write the files in which the raylet looks them up.

        The raylet would wait for the files that the agents write, and abort after 15 s, which no setting
        changes. It connects to the agents for as long as `START_TIMES` says.
        """
        ports = []
        for name, port in zip(RAY_AGENT_PORTS, _free_ports(len(RAY_AGENT_PORTS)), strict=True):
            setattr(self._ray_params, name, port)
            persist_port(self._session_dir, self._node_id, name, port)
            path = Path(self._session_dir, get_port_filename(self._node_id, name))
            ports.append(_RayAgentPort(name, port, path, path.stat().st_ino))
        return ports

    def _is_registered(self) -> bool:
        return self._node_id in {node.hex() for node in self.get_gcs_client().get_all_node_info()}

    def find_agents(self) -> set[psutil.Process]:
        """Return the processes of this session that its raylet started: they outlive it if they are late."""
        session = f"--session-dir={getattr(self, '_session_dir', None)}"
        processes = psutil.process_iter(["cmdline"])
        return {process for process in processes if session in (process.info["cmdline"] or ())}

    def _wait_for(self, is_up: Callable[[], bool], name: str) -> None:
        """Wait for a part of the start. Ray's own wait sees neither Ctrl-C nor a raylet that has ended.

        Raises:
            RuntimeError: the raylet has ended, or the time is over.
        """
        deadline = time.monotonic() + float(os.environ[RAYLET_WAIT_VARIABLE])
        (raylet,) = self.all_processes[ray_constants.PROCESS_TYPE_RAYLET]
        while not is_up():
            with contextlib.suppress(subprocess.TimeoutExpired):
                raylet.process.wait(POLL_S)
                raise RuntimeError("its raylet ended; raylet.out says why")
            if time.monotonic() > deadline:
                raise RuntimeError(f"its {name} did not start in time")

    @contextlib.contextmanager
    def _grafana_boards(self) -> Iterator[None]:
        """Put raylight's board next to Ray's. Their default folder is emptied while the dashboard starts."""
        default = os.path.join(self.get_session_dir_path(), "metrics", "dashboards")
        folder = os.environ.setdefault(BOARDS_VARIABLE, default)
        try:
            copy_board(folder)
            yield
        finally:
            if folder == default:
                del os.environ[BOARDS_VARIABLE]


def copy_board(folder: str) -> None:
    """Copy raylight's board of Grafana to a folder. A failure is logged: a run works without it."""
    try:
        os.makedirs(folder, exist_ok=True)
        shutil.copy(BOARD, folder)
    except OSError as error:
        logger.warning("raylight's board was not copied to %s: %s; see `raylight grafana`", folder, error)


@contextlib.contextmanager
def loopback_address(address: str | None) -> Iterator[None]:
    """Let `ray.init` connect to a cluster that listens on loopback only.

    Ray replaces loopback in an address by the address of this machine, where such a cluster does not listen.
    """
    port = (address or "").rpartition(":")[2]
    if not is_loopback(f"//{address}") or is_reachable(f"{get_node_ip_address()}:{port}"):
        yield
        return
    enabled = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled


def is_reachable(address: str) -> bool:
    """Return True if a process listens at `host:port`. Ray itself would retry for minutes."""
    host, _, port = address.rpartition("://")[2].strip("/").rpartition(":")
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S),
    ):
        return True
    return False


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children())


def end_processes(processes: Collection[psutil.Process]) -> None:
    """Kill processes of Ray that it does not end itself, or only with this process."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    for _ in range(round(END_TIMEOUT_S / POLL_S)):
        _, processes = psutil.wait_procs(processes, POLL_S)
        # psutil waits until the parent collects a zombie, which PID 1 of a container may do late or never
        processes = list(filter(_is_alive, processes))


def _is_alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() != psutil.STATUS_ZOMBIE
    return False


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now, outside the range from which the system chooses."""
    free: set[int] = set()
    failure: OSError | None = None
    for _ in range(PORT_TRIES):
        port = random.SystemRandom().choice(
            RAY_AGENT_PORT_RANGE
        )  # runs with one seed must not choose the same
        try:
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError as error:
            failure = error
            continue
        free.add(port)
        if len(free) == count:
            return list(free)
    raise ClusterStartError(f"Ray cannot start: {PORT_TRIES} ports were tried for its agents ({failure})")


def _describe(error: Exception, seconds: float, timeout_s: float, logs: str) -> str:
    busy = f"The load of the machine is {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
    reason = summarize_ray_error(error)
    if seconds < timeout_s:
        return f"Ray did not start: {reason}. {busy}; Ray's logs are in {logs}"
    return (
        f"Ray did not start within {timeout_s:g} s (start_timeout_s) a step, {seconds:.0f} s in all: "
        f"{reason}. {busy}. If it is only busy, raise start_timeout_s (of the runner, or of the engine for "
        f"`raylight serve`); otherwise see Ray's logs in {logs}"
    )
