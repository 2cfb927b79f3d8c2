"""The Ray cluster of a run: join the one that is there, or start a local one and stop it afterwards."""

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
    """How the driver is connected to Ray."""

    local: bool
    """A cluster was started for this connection, and ends with it."""
    dashboard: str = ""
    """Address of the dashboard, if this connection knows it."""


def answers(address: str) -> bool:
    """Whether anything listens at `host:port`; Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].strip("/").rpartition(":")
    with (
        contextlib.suppress(OSError, ValueError),
        socket.create_connection((host, int(port)), CONNECT_TIMEOUT_S),
    ):
        return True
    return False


def running_cluster() -> str | None:
    """Address of the cluster that `ray start` left on this machine, if it still answers.

    Ray itself believes its note of the last cluster, and waits for minutes on one that has crashed.
    """
    from ray._private.utils import read_ray_address

    address = read_ray_address()
    return address if address and answers(address) else None


@contextlib.contextmanager
def ray_session(address: str | None, log_to_driver: bool) -> Iterator[Connection]:
    """Be connected to Ray.

    An existing connection is used as it is. Otherwise `address`, `RAY_ADDRESS` or a cluster on this machine is joined; if there is
    none, or the address is "local", a local one is started. Only what was started here is shut down.

    Raises:
        ConfigError: no cluster answers at the address that was given.
    """
    if ray.is_initialized():
        yield Connection(local=False)
        return
    wanted = address or os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"log_to_driver": log_to_driver, "logging_level": logging.WARNING}
    # Ray says on every start that it uses a token, which is its default
    logging.getLogger("ray._private.authentication.authentication_token_setup").setLevel(logging.ERROR)
    named = wanted not in (None, "auto", "local")
    found = answers(wanted) if named and wanted else running_cluster() is not None
    if wanted not in (None, "local") and not found:
        raise ConfigError(
            f"no Ray cluster answers at {wanted!r}; start one with `ray start --head`, or give its host:port"
        )
    local = wanted == "local" or not found
    if not local:
        try:
            # without an address Ray finds the one of `ray start` itself, and only then sends its token by itself
            context = ray.init(address=wanted if named else None, **options)
        except (ConnectionError, RuntimeError) as error:
            raise ConfigError(
                f"the Ray cluster {wanted or 'on this machine'} cannot be joined: {error}. If it asks for a token, set "
                "RAY_AUTH_MODE=token; if it is gone, `ray stop` makes Ray forget it"
            ) from None
    if local:
        context = ray.init(address="local", include_dashboard=True, **options)
    try:
        yield Connection(local, f"http://{context.dashboard_url}" if context.dashboard_url else "")
    finally:
        ray.shutdown()


async def place(name: str, bundles: list[dict[str, float]], strategy: str, timeout: float) -> PlacementGroup:
    """Reserve bundles of resources before anything starts.

    Raises:
        PlacementError: the cluster could not place them within `timeout` seconds; says what was asked and what there is.
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
        f"the cluster cannot place {asked} ({strategy}) within {timeout:g} s{_demand(strategy)}; it has {has}, free now {free}. "
        "Ask for fewer learners, or for less of each, or add nodes"
    )


def _demand(strategy: str) -> str:
    """What a strict strategy asks of nodes, and what they are."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if strategy == "STRICT_SPREAD":
        return f", each on a node of its own, and there is {len(nodes)} node(s)"
    if strategy == "STRICT_PACK":
        largest = max(nodes, key=lambda node: (node.get("GPU", 0), node.get("CPU", 0)))
        return f", all on one node, and the largest has {_amounts(largest)}"
    return ""


def _amounts(resources: dict[str, Any]) -> str:
    return (
        ", ".join(f"{resources.get(name, 0):g} {name}" for name in ("CPU", "GPU") if resources.get(name))
        or "nothing free"
    )
