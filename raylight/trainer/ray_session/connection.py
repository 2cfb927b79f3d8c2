"""The Ray cluster of a run: an existing one that is joined, or a local one that is started and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import psutil
import ray
import ray._private.worker as ray_worker
from ray.exceptions import AuthenticationError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raylight._utils.no_proxy import bypass_proxies
from raylight._utils.ray_resources import format_amounts
from raylight.errors import ClusterStartError, ConfigError, PlacementError, summarize_ray_error
from raylight.log import log_level
from raylight.serving.deploy.leftovers import mark_session, sweep
from raylight.trainer.ray_session.blocking import ignored_interrupts, single_interrupt
from raylight.trainer.ray_session.cluster_monitor import (
    ClusterMonitor,
    driver_processes,
    is_cluster_lost,
    monitored_cluster,
    node_has_left,
)
from raylight.trainer.ray_session.local_cluster import (
    end_processes,
    is_reachable,
    loopback_address,
    start_local_cluster,
)
from raylight.types import JsonObject

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 180.0
"""Default of the seconds that each step of Ray's start may take, as `start_timeout_s` has elsewhere."""
SHUTDOWN_TIMEOUT_S = 20.0
"""Longest wait for the disconnection from a cluster that is lost, in seconds."""
JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Environment variable that Ray sets for the driver of a job."""


@dataclass(frozen=True)
class Connection:
    """The driver's connection to Ray."""

    owns_cluster: bool
    """True if the cluster was started for this connection and ends with it."""
    description: str
    """Address and size of the cluster, and how it was found."""
    hint: str = ""
    """Advice for using another cluster, if this is not the one that the user chose."""
    dashboard: str | None = None
    """Address of Ray's dashboard; None if the cluster has none."""

    def announce(self, note: Callable[[str], None], stage: Callable[[str], None]) -> None:
        """Show the cluster, as a note that stays if the user did not choose it."""
        if self.hint:
            note(f"{self.description}. {self.hint}")
        else:
            stage(self.description)


OWN_CLUSTER_HINT = 'For a separate cluster: Trainer(address="local"), or --address local'


def running_cluster() -> str | None:
    """Return the address of the cluster that `ray start` started on this machine; None if it is not
    reachable.

    Ray keeps the address of a cluster that has crashed, and would wait for it for minutes.
    """
    from ray._private.utils import read_ray_address

    address = read_ray_address()
    return address if address and is_reachable(address) else None


@contextlib.contextmanager
def ray_session(
    address: str | None, log_to_driver: bool, start_timeout_s: float = START_TIMEOUT_S
) -> Iterator[Connection]:
    """Connect to Ray, and watch it.

    An existing connection is reused. Otherwise the cluster at `address`, at `RAY_ADDRESS` or on this machine
    is joined; if there is none, or the address is "local", a local cluster is started. Only a cluster that
    was started here is shut down.

    Of several Ctrl-C, only the first interrupts the block; none interrupts the end of the connection.

    Args:
        start_timeout_s: seconds for each step of the start of a local cluster.

    Raises:
        ConfigError: no cluster is reachable at the given address.
        ClusterStartError: Ray did not start, or not in time.
    """
    with single_interrupt():
        if ray.is_initialized():
            read = address in (None, "auto", ray.get_runtime_context().gcs_address)
            unread = "" if read else f"address={address!r} is not read: call ray.shutdown() first to use it"
            description = f"uses this process's connection to {_describe_cluster()}"
            connection = Connection(False, description, unread, _dashboard())
            with (
                _ray_logs_restored(),
                monitored_cluster(ClusterMonitor(driver_processes(owns_cluster=False), node_has_left)),
            ):
                yield connection
            return
        try:
            connection = _connect(address, log_to_driver, start_timeout_s)
            with monitored_cluster(ClusterMonitor(driver_processes(connection.owns_cluster), node_has_left)):
                yield connection
        finally:
            with ignored_interrupts("Ray is being shut down"):
                with _ray_logs_restored():
                    _disconnect()
                sweep()


# Ray warns at every start that it uses a token, which is its default
@log_level("ray._private.authentication.authentication_token_setup", logging.ERROR)
def _connect(address: str | None, log_to_driver: bool, start_timeout_s: float) -> Connection:
    # gRPC would send the metrics of Ray's processes to the proxy
    bypass_proxies([ray.util.get_node_ip_address()])
    wanted = address or os.environ.get("RAY_ADDRESS") or None
    options: JsonObject = {"log_to_driver": log_to_driver, "logging_level": logging.WARNING}
    named = wanted not in (None, "auto", "local")
    found = is_reachable(wanted) if named and wanted else running_cluster() is not None
    if wanted not in (None, "local") and not found:
        source = "" if address else " (from RAY_ADDRESS)"
        raise ConfigError(
            f"no Ray cluster is reachable at {wanted!r}{source}; start one with `ray start --head`, or give "
            f"its host:port. {OWN_CLUSTER_HINT}"
        )
    local = wanted == "local" or not found
    if local:
        start_local_cluster(start_timeout_s, **options)
        mark_session(ray.get_runtime_context().get_session_name())
    else:
        # Ray sends the token of `ray start` only if it looks the address up itself
        _join(wanted if named else None, options)
    return _describe_connection(address, local)


def _join(address: str | None, options: JsonObject) -> None:
    where = address or "on this machine"
    try:
        with loopback_address(address):
            ray.init(address=address, **options)
    except (ConnectionError, RuntimeError, AuthenticationError) as error:
        raise ConfigError(
            f"the Ray cluster {where} cannot be joined: {error}. If it requires a token, set "
            "RAY_AUTH_MODE=token; if it has crashed, run `ray stop`"
        ) from None
    except Exception as error:  # Ray raises a plain Exception for several time-outs
        raise ClusterStartError(
            f"the Ray cluster {where} was not joined: {summarize_ray_error(error)}. It is busy or has "
            "crashed: see `ray status`, and raise RAY_gcs_server_request_timeout_seconds (60 by default) if "
            "it is busy"
        ) from None


@contextlib.contextmanager
def _ray_logs_restored() -> Iterator[None]:
    """At the end, let Ray print logs again, which the loss of the cluster has ended."""
    try:
        yield
    finally:
        ray_worker._worker_logs_enabled = True


def _disconnect() -> None:
    """Disconnect from Ray, and end a cluster that this process started."""
    node = ray_worker._global_node
    orphans: set[psutil.Process] = set() if node is None else _raylet_children(node)
    if is_cluster_lost():
        ending = threading.Thread(target=ray.shutdown, name="ray.shutdown", daemon=True)
        ending.start()
        ending.join(SHUTDOWN_TIMEOUT_S)
        if ending.is_alive():
            logger.warning(
                "Ray did not disconnect from the lost cluster within %g s; killing what is left of it",
                SHUTDOWN_TIMEOUT_S,
            )
            if node is not None:
                node.kill_all_processes(check_alive=False, allow_graceful=False)
    else:
        ray.shutdown()
    end_processes(orphans)


def _raylet_children(node: Any) -> set[psutil.Process]:
    """Return the processes that the raylet of this process has started.

    Some of them end only after minutes: without a GCS those that were about to connect and Ray's agents, and
    after a clock was set back all, because Ray's timers wait for as long.
    """
    found: set[psutil.Process] = set()
    for raylet in node.all_processes.get("raylet", ()):
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= set(psutil.Process(raylet.process.pid).children(recursive=True))
    return found


def _describe_connection(address: str | None, local: bool) -> Connection:
    if local:
        description = f"started {_describe_cluster()}, which ends with this run"
        return Connection(True, description, dashboard=_dashboard())
    if address is not None:
        return Connection(False, f"joined {_describe_cluster()}", dashboard=_dashboard())
    source = "address from RAY_ADDRESS" if os.environ.get("RAY_ADDRESS") else "found on this machine"
    in_job = JOB_VARIABLE in os.environ
    hint = "" if in_job else OWN_CLUSTER_HINT
    return Connection(False, f"joined {_describe_cluster()}, {source}", hint, _dashboard())


def _dashboard() -> str | None:
    """Return the address of Ray's dashboard; None if the cluster has none."""
    address = ray_worker.get_dashboard_url()  # no public function returns it for a joined connection
    return f"http://{address}" if address else None


def _describe_cluster() -> str:
    """Name the connected cluster, its size and its dashboard."""
    nodes = sum(node["Alive"] for node in ray.nodes())
    dashboard = _dashboard()
    return (
        f"the Ray cluster at {ray.get_runtime_context().gcs_address} ({nodes} node{'s'[: nodes != 1]}, "
        f"{format_amounts(ray.cluster_resources())}{f'; dashboard {dashboard}' if dashboard else ''})"
    )


async def reserve(
    name: str, bundles: list[dict[str, float]], strategy: str, timeout: float
) -> PlacementGroup:
    """Reserve bundles of resources before anything starts.

    Raises:
        PlacementError: the cluster could not place them within `timeout` seconds; the message lists request
            and resources.
    """
    group = placement_group(bundles, strategy=strategy, name=name)
    try:
        # asks the GCS only: `group.ready()` would also wait for a worker process to start
        if await asyncio.to_thread(group.wait, timeout):
            return group
    except BaseException:
        remove_placement_group(group)
        raise
    asked = f"{len(bundles)} x {format_amounts(bundles[0])}"
    has, free = map(format_amounts, (ray.cluster_resources(), ray.available_resources()))
    remove_placement_group(group)
    raise PlacementError(
        f"the cluster cannot place {asked} ({strategy}) within {timeout:g} s "
        f"(learner.placement_timeout_s){_demand(strategy)}; it has {has}, free now {free}. Reduce learner.n "
        "or the resources of each learner, end other work on the cluster, or add nodes"
    )


def _demand(strategy: str) -> str:
    """Describe what a strict strategy requires of the nodes, and the nodes."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if strategy == "STRICT_SPREAD":
        return f", each on its own node; there are {len(nodes)} node(s)"
    if strategy == "STRICT_PACK":
        largest = max(nodes, key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)))
        return f", all on one node; the largest has {format_amounts(largest)}"
    return ""
