"""Ray Serve itself: its fast ingress, its ports, and where it listens."""

from __future__ import annotations

import os
import socket
from typing import Any

SERVE_FLAGS = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_ENABLE_DIRECT_INGRESS": "1",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0.1",
    "RAY_SERVE_DIRECT_INGRESS_SHUTDOWN_BUFFER_S": "1",
}
"""HAProxy hands requests straight to the replica: eight times the requests per second of Serve's Python proxy. Our replicas
block no event loop and need no thread beside Serve's: a third more requests per second. The flags must be in the environment
before Serve is imported, and in that of its controller and replicas. A run's replicas have nothing to drain."""
PROXY_PORTS = {
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}
"""HAProxy, and the proxy that it turns to while it knows of no replica, listen on these too. HAProxy does not start where another
Serve on the machine has them; the fallback would share its port, and answer for the other Serve's applications."""
STICKY = """uri depth 4
    hash-type consistent sdbm avalanche
    hash-balance-factor 150"""
"""How HAProxy chooses a replica: by the hash of `/APPLICATION/rollout/ID`, so that the calls of one rollout reach the replica that
has its prefixes cached; consistently, so that they move only when it dies; and to the next one where it has more than 1.5 times
the mean number of requests. Ray writes this after the word `balance` into HAProxy's defaults."""
ROUTING = {"RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": STICKY}
for _flag, _value in SERVE_FLAGS.items():
    os.environ.setdefault(_flag, _value)

import ray  # noqa: E402
import urllib3  # noqa: E402
from ray import serve  # noqa: E402
from ray.exceptions import RayError  # noqa: E402
from ray.serve.schema import LoggingConfig  # noqa: E402

from raylight.errors import EngineStartError, PortInUseError  # noqa: E402

DEFAULT_PORT = 8000
ANY_HOST = "0.0.0.0"
LOOPBACK = ("127.0.0.1", "localhost", "::1")
QUIET = LoggingConfig(enable_access_log=False, log_level="WARNING")


def start_serve(host: str | None, port: int | None) -> tuple[str, int]:
    """Start Serve with its fast ingress; returns the host and port on which it listens.

    Args:
        host: None for loopback on a cluster of one node and all interfaces on more.
        port: None for the usual one or any free one.

    Raises:
        PortInUseError: the port is taken.
        EngineStartError: Serve does not start.
    """
    host = host or (ANY_HOST if len(alive_nodes()) > 1 else "127.0.0.1")
    port = choose_port(host, port)
    env = (
        SERVE_FLAGS
        | ROUTING
        | {flag: str(choose_port(ANY_HOST, None, usual)) for flag, usual in PROXY_PORTS.items()}
    )
    try:
        serve.start(
            http_options={"host": host, "port": port},
            logging_config=QUIET,
            controller_options={"runtime_env": {"env_vars": env}},
        )
    except RayError as error:
        raise EngineStartError(f"Ray Serve did not start: {error}") from None
    return host, port


def alive_nodes() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def head_address() -> str:
    """The head node's address: Serve's ingress runs there whatever nodes the replicas are on."""
    heads = [node for node in alive_nodes() if "node:__internal_head__" in node["Resources"]]
    return heads[0]["NodeManagerAddress"] if heads else ray.util.get_node_ip_address()


def serve_http_options() -> tuple[str, int] | None:
    """Host and port of the Serve that already runs on this cluster; None if none does."""
    from ray.serve.context import _disconnect, _get_global_client

    _disconnect()  # Serve takes its client of another cluster for this one's where both call their jobs alike, as local ones do
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    return client.http_config.host, client.http_config.port


def choose_port(host: str, wanted: int | None, usual: int = DEFAULT_PORT) -> int:
    """The wanted port if it is free; with no wish, the usual one or else any free one.

    Raises:
        PortInUseError: the wanted port is taken.
    """
    for port in (wanted or usual, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                return probe.getsockname()[1]
            except OSError as error:
                if wanted:
                    raise PortInUseError(
                        f"port {wanted} on {host} is taken ({os.strerror(error.errno or 0)}); choose another one, "
                        "or none to let raylight find a free one"
                    ) from None
    raise PortInUseError(f"no port is free on {host}")


def wait_for_route(url: str) -> None:
    """Ask until the ingress has taken up the new route; Serve has no event for that.

    Raises:
        EngineStartError: it does not answer, some 30 s after the replicas were up.
    """
    retries = urllib3.Retry(
        total=60, backoff_factor=0.05, backoff_max=0.5, status_forcelist=(404, 500, 502, 503, 504)
    )
    try:
        urllib3.PoolManager().request("GET", url, retries=retries, timeout=5)
    except urllib3.exceptions.HTTPError as error:
        raise EngineStartError(f"the replicas are up, but {url} does not answer: {error}") from None
