"""The Ray cluster of a run: an existing one that is joined, or a local one that is started and stopped."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raylight.errors import ConfigError, PlacementError

CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Connection:
    """The driver's connection to Ray."""

    owns_cluster: bool
    """True if the cluster was started for this connection and ends with it."""
    dashboard: str = ""
    """URL of the Ray dashboard; empty if unknown."""


def is_reachable(address: str) -> bool:
    """Return True if a process listens at `host:port`. Ray itself would retry for minutes."""
    host, _, port = address.rpartition("://")[2].strip("/").rpartition(":")
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S),
    ):
        return True
    return False


def running_cluster() -> str | None:
    """Return the address of the cluster that `ray start` started on this machine; None if it is not
    reachable.

    Ray keeps the address of a cluster that has crashed, and would wait for it for minutes.
    """
    from ray._private.utils import read_ray_address

    address = read_ray_address()
    return address if address and is_reachable(address) else None


@contextlib.contextmanager
def ray_session(address: str | None, log_to_driver: bool) -> Iterator[Connection]:
    """Connect to Ray.

    An existing connection is reused. Otherwise the cluster at `address`, at `RAY_ADDRESS` or on this machine
    is joined; if there is none, or the address is "local", a local cluster is started. Only a cluster that
    was started here is shut down.

    Raises:
        ConfigError: no cluster is reachable at the given address.
    """
    if ray.is_initialized():
        yield Connection(owns_cluster=False)
        return
    wanted = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": log_to_driver, "logging_level": logging.WARNING}
    # Ray warns at every start that it uses a token, which is its default
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    named = wanted not in (None, "auto", "local")
    found = is_reachable(wanted) if named and wanted else running_cluster() is not None
    if wanted not in (None, "local") and not found:
        raise ConfigError(
            f"no Ray cluster is reachable at {wanted!r}; start one with `ray start --head`, or give its "
            "host:port"
        )
    local = wanted == "local" or not found
    if not local:
        try:
            # Ray sends the token of `ray start` only if it looks the address up itself
            context = ray.init(address=wanted if named else None, **options)
        except (ConnectionError, RuntimeError) as error:
            raise ConfigError(
                f"the Ray cluster {wanted or 'on this machine'} cannot be joined: {error}. If it requires a "
                "token, set RAY_AUTH_MODE=token; if it has crashed, run `ray stop`"
            ) from None
    if local:
        context = ray.init(address="local", include_dashboard=True, **options)
    try:
        yield Connection(local, f"http://{context.dashboard_url}" if context.dashboard_url else "")
    finally:
        ray.shutdown()


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
        await asyncio.wait_for(group.ready(), timeout)
        return group
    except TimeoutError:
        remove_placement_group(group)
    except BaseException:
        remove_placement_group(group)
        raise
    asked = f"{len(bundles)} x {_amounts(bundles[0])}"
    has, free = _amounts(ray.cluster_resources()), _amounts(ray.available_resources())
    raise PlacementError(
        f"the cluster cannot place {asked} ({strategy}) within {timeout:g} s{_demand(strategy)}; it has "
        f"{has}, free now {free}. Reduce learner.n or the resources of each learner, or add nodes"
    )


def _demand(strategy: str) -> str:
    """Describe what a strict strategy requires of the nodes, and the nodes."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if strategy == "STRICT_SPREAD":
        return f", each on its own node; there are {len(nodes)} node(s)"
    if strategy == "STRICT_PACK":
        largest = max(nodes, key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)))
        return f", all on one node; the largest has {_amounts(largest)}"
    return ""


def _amounts(resources: dict[str, Any]) -> str:
    return (
        ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU") if resources.get(name))
        or "none"
    )
