"""Ray Serve's HTTP ingress: HAProxy, its ports and its address."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SERVE_FLAGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.1",
    "RAY_SERVE_DIRECT_INGRESS_SHUTDOWN_BUFFER_S": "1",
}
"""Serve's environment flags. HAProxy sends requests straight to the replica, which gives eight times the
throughput of Serve's Python proxy. raylight's replicas never block the event loop, so they run without
Serve's extra thread, which gives another third. Replicas of a run have nothing to drain. The flags must be in
the environment before Serve is imported, and in the environments of its controller and replicas."""
PROXY_PORT_FLAGS = {
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}
"""Further ports, of HAProxy and of the fallback proxy that serves while HAProxy has no replica, with their
defaults. If another Serve on the machine uses them, HAProxy does not start, and the fallback proxy would
share its port and receive the other Serve's requests."""
STICKY_ROUTING = """uri depth 4
    hash-type consistent sdbm avalanche
    hash-balance-factor 150"""
"""HAProxy's balancing rule: hash `/APPLICATION/rollout/ID`, so that the calls of one rollout reach the
replica that has their prefixes cached. Consistent hashing moves a rollout only when its replica dies. A
replica with more than 1.5 times the mean number of requests passes new ones to the next replica. Ray writes
this text after the word `balance` into HAProxy's defaults."""
ROUTING = {"RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": STICKY_ROUTING}
PATIENCE = {
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S": "60",
}
"""Serve kills a proxy that is not ready after 5 s, its default. On a busy machine a proxy needs longer."""
for _flag, _value in SERVE_FLAGS.items():
    os.environ.setdefault(_flag, _value)

import ray  # noqa: E402
import urllib3  # noqa: E402
from filelock import FileLock, Timeout  # noqa: E402
from ray import serve  # noqa: E402
from ray.exceptions import RayError  # noqa: E402
from ray.serve.schema import LoggingConfig  # noqa: E402

from raylight.errors import EngineStartError, PortInUseError  # noqa: E402

logger = logging.getLogger(__name__)
DEFAULT_PORT = 8000
PORT_LOCK_S = 180.0
"""Longer than a start of Serve takes with the times of `PATIENCE`."""
PORT_TAKEN = "Address already in use"
"""Part of HAProxy's message."""
ANY_HOST = "0.0.0.0"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
QUIET = LoggingConfig(enable_access_log=False, log_level="WARNING")


def start_serve(host: str | None, port: int | None) -> tuple[str, int]:
    """Start Serve with HAProxy and return its host and port.

    Args:
        host: None: loopback on a cluster of one node, all interfaces otherwise.
        port: None: the default port, or any free one if that is taken.

    Raises:
        PortInUseError: the port is taken.
        EngineStartError: Serve does not start.
    """
    host = host or (ANY_HOST if len(alive_nodes()) > 1 else "127.0.0.1")
    with _port_lock():
        port = choose_port(host, port)
        ports = {
            flag: str(choose_port(ANY_HOST, None, default)) for flag, default in PROXY_PORT_FLAGS.items()
        }
        try:
            serve.start(
                http_options={"host": host, "port": port},
                logging_config=QUIET,
                controller_options={"runtime_env": {"env_vars": SERVE_FLAGS | ROUTING | PATIENCE | ports}},
            )
        except TimeoutError as error:  # `wait_for_route` waits on, once the replicas are up
            logger.warning("Ray Serve is slow to start (%s); the machine is busy, still waiting", error)
        except RayError as error:
            if PORT_TAKEN in str(error):
                taken = ", ".join([str(port), *ports.values()])
                raise EngineStartError(
                    f"Ray Serve did not start: one of its ports ({taken}) was free, and another process took "
                    f"it while Serve started. Start the run again.\n{error}"
                ) from None
            raise EngineStartError(f"Ray Serve did not start: {error}") from None
    return host, port


@contextlib.contextmanager
def _port_lock() -> Iterator[None]:
    """Hold a lock of this machine while Serve takes its ports, so that no two drivers choose the same.

    A driver that waits longer than PORT_LOCK_S goes on without the lock.
    """
    lock = FileLock(Path(tempfile.gettempdir(), f"raylight-ports-{os.getuid()}.lock"))
    try:
        lock.acquire(timeout=PORT_LOCK_S)
    except Timeout:
        logger.warning("%s was held for %g s; choosing ports without it", lock.lock_file, PORT_LOCK_S)
    try:
        yield
    finally:
        lock.release()


def alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def head_address() -> str:
    """Return the head node's address: Serve's ingress always runs there."""
    heads = [node for node in alive_nodes() if "node:__internal_head__" in node["Resources"]]
    return heads[0]["NodeManagerAddress"] if heads else ray.util.get_node_ip_address()


def serve_http_options() -> tuple[str, int] | None:
    """Return host and port of the Serve instance that runs on this cluster, or None."""
    from ray.serve.context import _disconnect, _get_global_client

    # drop the cached client of another cluster: Serve caches it by job id, which local clusters share
    _disconnect()
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    return client.http_config.host, client.http_config.port


def choose_port(host: str, requested: int | None, default: int = DEFAULT_PORT) -> int:
    """Return the requested port; without a request, the default port, or any free one if that is taken.

    Raises:
        PortInUseError: the requested port is taken.
    """
    for port in (requested or default, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return probe.getsockname()[1]
            except OSError as error:
                if requested:
                    raise PortInUseError(
                        f"port {requested} on {host} is taken ({os.strerror(error.errno or 0)}); choose "
                        "another port, or leave it out to use any free one"
                    ) from None
    raise PortInUseError(f"no port is free on {host}")


def wait_for_route(url: str) -> None:
    """Send requests until the ingress serves a new route; Serve has no event to wait on.

    Raises:
        EngineStartError: the route does not respond within some 30 s.
    """
    retries = urllib3.Retry(
        total=60, backoff_factor=0.05, backoff_max=0.5, status_forcelist=(404, 500, 502, 503, 504)
    )
    try:
        urllib3.PoolManager().request("GET", url, retries=retries, timeout=5)
    except urllib3.exceptions.HTTPError as error:
        raise EngineStartError(
            f"the replicas are up, but {url} does not respond: {error}; see the log of Serve's proxy"
        ) from None
