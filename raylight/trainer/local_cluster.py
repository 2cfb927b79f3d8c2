"""A local Ray cluster: its start, patient on a busy machine, and connections to it from this machine only."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
import ray._private.node as ray_node
import ray._private.parameter as ray_parameter
import ray._private.ray_constants as ray_constants
from ray._common.utils import get_default_ray_temp_dir
from ray._private.services import get_node_ip_address

from raylight.errors import ClusterStartError, summarize_ray_error
from raylight.files import write_atomic
from raylight.ray_metrics.board import BOARD_FILE, board
from raylight.trainer.blocking import ignored_interrupts

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
END_TIMEOUT_S = 10.0
CONNECT_TIMEOUT_S = 2.0
POLL_S = 0.05
LOOPBACK = ("127.0.0.1", "localhost", "[::1]")


def start_local_cluster(timeout_s: float, log_to_driver: bool = True, **options: Any) -> None:
    """Start a Ray cluster that ends with this process, and connect to it.

    All its ports are bound to the loopback interface, unless RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER, Ray's switch
    for that, is set.

    Args:
        timeout_s: seconds for each step of the start. A variable RAY_... of the user takes precedence.
        log_to_driver: print the output of actors here.
        options: further arguments of `ray.init`.

    Raises:
        ClusterStartError: Ray did not start, or not in time.
    """
    before, began = _children(), time.monotonic()
    try:
        with _start_settings(timeout_s, log_to_driver):
            ray.init(address="local", include_dashboard=True, log_to_driver=log_to_driver, **options)
    except BaseException as error:
        with ignored_interrupts("Ray is being shut down"):
            end_processes(_children() - before)
            ray.shutdown()
        if not isinstance(error, Exception):
            raise
        raise ClusterStartError(_describe(error, time.monotonic() - began, timeout_s)) from None


@contextlib.contextmanager
def _start_settings(timeout_s: float, log_to_driver: bool) -> Iterator[None]:
    """Set the times, the interface and the processes of Ray's start. Ray's processes inherit the first two as
    variables.

    The dashboard's agent takes any free port: it would try for 3 s to take its default port, which another
    cluster of this machine has. The log monitor only sends the output of actors to the driver.
    """
    constants: dict[str, Any] = {}
    if "RAY_DASHBOARD_STARTUP_TIMEOUT_S" not in os.environ:
        constants["RAY_DASHBOARD_STARTUP_TIMEOUT_S"] = timeout_s
    if ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR not in os.environ:
        constants["ENABLE_RAY_CLUSTER"] = False
    variables = {f"RAY_{name}": str(round(timeout_s * unit)) for name, unit in START_TIMES.items()}
    variables[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # for jobs, and programs that an agent starts
    added = {name: value for name, value in variables.items() if name not in os.environ}
    previous = {name: getattr(ray_constants, name) for name in constants}
    module: Any = ray_parameter
    parameters = module.RayParams
    module.RayParams = functools.partial(
        parameters, dashboard_agent_listen_port=0, include_log_monitor=log_to_driver
    )
    nodes: Any = ray_node
    node = nodes.Node
    nodes.Node = _LocalNode
    os.environ.update(added)
    for name, value in constants.items():
        setattr(ray_constants, name, value)
    try:
        yield
    finally:
        module.RayParams = parameters
        nodes.Node = node
        for name, value in previous.items():
            setattr(ray_constants, name, value)
        for name in added:
            os.environ.pop(name, None)


class _LocalNode(ray_node.Node):
    """Ray's node, which waits for the dashboard only once the raylet starts too, and notices a raylet that
    ends."""

    _dashboard: dict[str, Any] | None = None

    def start_api_server(self, **options: Any) -> None:
        self._dashboard = options

    def start_ray_processes(self) -> None:
        super().start_ray_processes()
        if self._dashboard is not None:
            with self._grafana_boards():
                super().start_api_server(**self._dashboard)
        self._wait_for_raylet()

    def _wait_for_raylet(self) -> None:
        """Wait until the raylet is known to the cluster.

        Ray's own wait, which then ends at once, does not see that the raylet has ended, nor Ctrl-C.

        Raises:
            RuntimeError: the raylet has ended.
        """
        deadline = time.monotonic() + float(os.environ[RAYLET_WAIT_VARIABLE])
        client, (raylet,) = self.get_gcs_client(), self.all_processes[ray_constants.PROCESS_TYPE_RAYLET]
        while self._node_id not in {node.hex() for node in client.get_all_node_info()}:
            with contextlib.suppress(subprocess.TimeoutExpired):
                raylet.process.wait(POLL_S)
                raise RuntimeError("its raylet ended; raylet.out says why")
            if time.monotonic() > deadline:
                return

    @contextlib.contextmanager
    def _grafana_boards(self) -> Iterator[None]:
        """Put raylight's board beside Ray's. Their default folder is emptied while the dashboard starts."""
        default = os.path.join(self.get_session_dir_path(), "metrics", "dashboards")
        folder = os.environ.setdefault(BOARDS_VARIABLE, default)
        try:
            threading.Thread(target=write_board, args=(folder,), daemon=True).start()
            yield
        finally:
            if folder == default:
                del os.environ[BOARDS_VARIABLE]


def write_board(folder: str) -> None:
    """Write raylight's board of Grafana to a folder. A failure is logged: a run works without it."""
    try:
        os.makedirs(folder, exist_ok=True)
        write_atomic(Path(folder, BOARD_FILE), board())
    except Exception:
        logger.warning(
            "raylight's board was not written to %s; see `raylight grafana`", folder, exc_info=True
        )


@contextlib.contextmanager
def loopback_address(address: str | None) -> Iterator[None]:
    """Let `ray.init` connect to a cluster that listens on loopback only.

    Ray replaces loopback in an address by the address of this machine, where such a cluster does not listen.
    """
    host, _, port = (address or "").rpartition(":")
    if host not in LOOPBACK or is_reachable(f"{get_node_ip_address()}:{port}"):
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


def end_processes(processes: set[psutil.Process]) -> None:
    """Kill processes of Ray that it does not end itself, or only with this process."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(list(processes), END_TIMEOUT_S)


def _describe(error: Exception, seconds: float, timeout_s: float) -> str:
    busy = f"The load of the machine is {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs"
    reason = summarize_ray_error(error)
    if seconds < timeout_s:
        return f"Ray did not start: {reason}. {busy}; Ray's logs are in {_logs()}"
    return (
        f"Ray did not start within {timeout_s:g} s (start_timeout_s) a step, {seconds:.0f} s in all: "
        f"{reason}. {busy}. If it is only busy, raise start_timeout_s (of the runner, or of the engine for "
        f"`raylight serve`); otherwise see Ray's logs in {_logs()}"
    )


def _logs() -> str:
    return os.path.join(get_default_ray_temp_dir(), "session_latest", "logs")
