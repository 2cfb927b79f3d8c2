"""Ray Serve's HTTP ingress: its environment, start, address and end."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable
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
the environment before Serve is imported, and in the environments of its controller and replicas. On a head
without HAProxy two of them change, see `ingress_host.OWN_PROXY`."""
STICKY_ROUTING = """uri depth 4
    hash-type consistent sdbm avalanche
    hash-balance-factor 150"""
"""HAProxy's balancing rule: hash `/APPLICATION/rollout/ID`, so that the calls of one rollout reach the
replica that has their prefixes cached. Consistent hashing moves a rollout only when its replica dies. A
replica with more than 1.5 times the mean number of requests passes new ones to the next replica. Ray writes
this text after the word `balance` into HAProxy's defaults."""
ROUTING = {"RAY_SERVE_HAPROXY_BALANCE_ALGORITHM": STICKY_ROUTING}
START_DEADLINES = ("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S")
"""Longest times that a proxy may take to start: `start_timeout_s`. Their defaults, 5 and 30 s, are too short
for a busy machine."""
HEALTH = {
    "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "1",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "5",
    "RAY_SERVE_PROXY_GRACEFUL_SHUTDOWN_TIMEOUT_S": "2",
}
"""Checks of Serve's proxies. Serve replaces a proxy after three failed checks in a row. A check fails at once
if the proxy is dead, and after 5 s if it does not respond; the next one follows 1 s later (defaults: 10 s and
10 s)."""
LONG_CALLS = {"RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "900"}
"""Longest time that requests in flight may take after a change of routes (default: 120 s)."""
for _flag, _value in SERVE_FLAGS.items():
    os.environ.setdefault(_flag, _value)

import ray  # noqa: E402
import ray._private.worker as ray_worker  # noqa: E402
import urllib3  # noqa: E402
from ray import serve  # noqa: E402
from ray.exceptions import RayActorError, RayError  # noqa: E402
from ray.experimental import internal_kv  # noqa: E402
from ray.serve._private.api import _create_controller_and_proxy_refs  # noqa: E402
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE  # noqa: E402
from ray.serve.config import ControllerOptions  # noqa: E402
from ray.serve.schema import LoggingConfig  # noqa: E402

from raylight._utils.no_proxy import LOOPBACK  # noqa: E402
from raylight.errors import EngineStartError  # noqa: E402
from raylight.serving.deploy.ingress_host import ANY_HOST, Host, IngressPlan  # noqa: E402
from raylight.types import JsonObject  # noqa: E402

logger = logging.getLogger(__name__)
START_LOST = ("Address already in use", "HAProxy crashed during startup")
"""Parts of the messages of a start that another attempt may cure: a port was taken meanwhile, or HAProxy was
killed."""
START_ATTEMPTS = 3
QUIET = LoggingConfig(enable_access_log=False, log_level="WARNING")
STARTED_KEY = b"raylight:started-serve"
"""Key of the cluster's key-value store with the Serve that raylight started: its controller's actor ID and
its flags."""


def start_serve(
    host: str | None, port: int | None, machine: Host, timeout_s: float, deploy: Callable[[str, int], None]
) -> tuple[str, int]:
    """Start Serve with HAProxy and return its host and port, once HAProxy has its port.

    If another process takes a port meanwhile, or a proxy dies, Serve is started again.

    Args:
        host: None: loopback on a cluster that no other machine can join, all interfaces otherwise.
        port: None: the default port, or any free one if that is taken.
        machine: the ingress's machine, reserved for this driver.
        timeout_s: longest time for all attempts.
        deploy: gives Serve the application, whose replicas start with the proxies. Called with host and
            port in each attempt.

    Raises:
        PortInUseError: the requested port is taken.
        EngineStartError: Serve does not start.
    """
    host, end = host or (ANY_HOST if is_joinable() else "127.0.0.1"), time.monotonic() + timeout_s
    for attempt in range(1, START_ATTEMPTS + 1):
        plan = machine.plan(host, port)
        if plan.warning and attempt == 1:
            logger.warning(plan.warning)
        try:
            _start(host, plan, timeout_s, end, deploy)
            break
        except TimeoutError:
            raise EngineStartError(
                f"Ray Serve's ingress was not up within {timeout_s:g} s (engine.start_timeout_s); the "
                "machine is busy, or HAProxy fails: see proxy_*.log in Ray's session folder, or raise "
                "engine={'start_timeout_s': ...}"
            ) from None
        except RayError as error:
            lost = isinstance(error, RayActorError) or any(part in str(error) for part in START_LOST)
            if not lost or attempt == START_ATTEMPTS or not ray.is_initialized():
                raise EngineStartError(f"Ray Serve did not start ({attempt} attempts): {error}") from None
            logger.warning("Ray Serve did not start (%s); starting it again", _last_line(error))
            serve.shutdown()
    return host, plan.port


def _start(
    host: str, plan: IngressPlan, timeout_s: float, end: float, deploy: Callable[[str, int], None]
) -> None:
    """Start Serve, and wait until its proxies have their ports.

    `serve.start` returns only then, which would delay the replicas, and waits for 60 s at most.

    Raises:
        TimeoutError: they did not until `end`.
        RayError: a proxy failed.
        EngineStartError: this process is no longer connected to Ray.
    """
    if not ray.is_initialized():  # Serve would start a cluster for itself
        raise EngineStartError("the connection to Ray has ended")
    deadlines = dict.fromkeys(START_DEADLINES, str(math.ceil(timeout_s)))
    variables = SERVE_FLAGS | ROUTING | HEALTH | LONG_CALLS | deadlines | plan.environment
    started, proxies_ready = _create_controller_and_proxy_refs(
        http_options={"host": host, "port": plan.port},
        grpc_options=None,
        global_logging_config=QUIET,
        global_tracing_config=None,
        controller_options=ControllerOptions(runtime_env={"env_vars": variables}),
        proxy_location="HeadOnly",
    )
    flags = {name: variables[name] for name in SERVE_FLAGS}
    content = {"controller": started._actor_id.binary().hex(), "flags": flags}
    internal_kv._internal_kv_put(STARTED_KEY, json.dumps(content).encode())
    deploy(host, plan.port)
    ray.get(proxies_ready, timeout=max(end - time.monotonic(), 0))


def stop_serve(machine: Host) -> None:
    """Shut Serve down if it is still unused.

    Args:
        machine: the ingress's machine, reserved for this driver.
    """
    if is_unused():
        serve.shutdown()
        internal_kv._internal_kv_del(STARTED_KEY)
        machine.remove_folder(head_node()["NodeID"])


def starting_replicas(name: str) -> list[str]:
    """Return the names of the actors of an application whose replicas still start."""
    application = ray.get(controller().get_serve_instance_details.remote())["applications"].get(name)
    return [
        replica["actor_name"]
        for deployment in (application["deployments"].values() if application else ())
        for replica in deployment["replicas"]
        if replica["state"] == "STARTING"
    ]


def is_unused() -> bool:
    """Return True if raylight started the running Serve, and it has no application."""
    return serve_http_options() is not None and bool(started_flags()) and not serve.status().applications


def started_flags() -> dict[str, str]:
    """Return the flags with which a raylight run or `raylight serve` started the running Serve; empty if
    another program started it."""
    content = json.loads(internal_kv._internal_kv_get(STARTED_KEY) or b"{}")
    is_raylights = content.get("controller") == _controller_id().hex()
    return content["flags"] if is_raylights else {}


def controller() -> Any:
    """Return the handle of Serve's controller.

    Raises:
        ValueError: Serve does not run.
    """
    return ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)


def _controller_id() -> bytes:
    return controller()._actor_id.binary()


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


def alive_nodes() -> list[JsonObject]:
    return [node for node in ray.nodes() if node["Alive"]]


def is_joinable() -> bool:
    """Return True if other machines can join the cluster, now or later.

    An autoscaler or `ray start --address` may add nodes at any time, and Serve cannot change its address. A
    cluster that a run has started listens on loopback. One of the user's own `ray.init()` has no other node,
    as a rule, and ends with this process.
    """
    if len(alive_nodes()) > 1:
        return True
    node = ray_worker._global_node  # a joined cluster's is not a head
    started_here = node is not None and node.is_head()
    return not started_here and head_node()["NodeManagerAddress"] not in LOOPBACK


def head_node() -> JsonObject:
    """Return the head node: Serve's ingress always runs there."""
    nodes = alive_nodes()
    return next((node for node in nodes if "node:__internal_head__" in node["Resources"]), nodes[0])


def serve_http_options() -> tuple[str, int] | None:
    """Return host and port of the Serve instance that runs on this cluster, or None."""
    from ray.serve.context import _disconnect, _get_global_client

    # drop the cached client of another cluster: Serve caches it by job id, which local clusters share
    _disconnect()
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return None
    return client.http_config.host, client.http_config.port


def wait_for_route(url: str, timeout_s: float) -> None:
    """Send requests until the ingress serves a new route; Serve has no event to wait on.

    Raises:
        EngineStartError: the route does not respond within `timeout_s` seconds.
    """
    retries = urllib3.Retry(
        total=20, backoff_factor=0.05, backoff_max=0.5, status_forcelist=(404, 500, 502, 503, 504)
    )
    end = time.monotonic() + timeout_s
    while True:
        try:
            urllib3.PoolManager().request("GET", url, retries=retries, timeout=5)
            return
        except urllib3.exceptions.HTTPError as error:
            if time.monotonic() >= end:
                raise EngineStartError(
                    f"the replicas are up, but {url} does not respond within {timeout_s:g} s "
                    f"(engine.start_timeout_s): {error}; see the log of Serve's proxy, or raise "
                    "engine={'start_timeout_s': ...}"
                ) from None
