"""Rendezvous of the learner ranks, and the network interface of their collectives.

Neither torch's store nor gloo and NCCL have a key, so the first two listen on the loopback interface if all
ranks are on one node. NCCL uses the node's address in the cluster, which is loopback if no other node can
join: the id of a group carries it, and the workers of engines on other nodes join groups of the ranks.
"""

from __future__ import annotations

import datetime
import os
import socket
from typing import Any

import ray
from ray.util.placement_group import get_current_placement_group, placement_group_table

from raylight.errors import LearnerError

LOOPBACK = "127.0.0.1"
GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


def open_store(ranks: int, timeout: datetime.timedelta) -> tuple[tuple[str, int], Any]:
    """Open torch's store on a free port of rank 0; return its address, and the store.

    torch itself would listen on all interfaces.
    """
    import torch.distributed as dist

    host = LOOPBACK if ranks == 1 or _on_one_node() else ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            host,
            port,
            ranks,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=listener.detach(),
        )
    return (host, port), store


def _on_one_node() -> bool:
    """Return True if all bundles of this actor's placement group are on one node."""
    group = get_current_placement_group()
    return group is not None and len(set(placement_group_table(group)["bundles_to_node_id"].values())) == 1


def use_interface_of(store_host: str, on_gpu: bool) -> None:
    """Let gloo use the interface through which the ranks reach the store, and NCCL the cluster's. The
    user's own variables take precedence.

    Args:
        on_gpu: the ranks compute on GPUs, and use NCCL too.

    Raises:
        LearnerError: see `find_interface`.
    """
    node = ray.util.get_node_ip_address()
    own = LOOPBACK if store_host == LOOPBACK else node
    if GLOO not in os.environ:
        os.environ[GLOO] = find_interface(own, GLOO)
    if on_gpu and NCCL not in os.environ:
        os.environ[NCCL] = f"={find_interface(node, NCCL)}"  # without "=", the beginning of a name


def find_interface(address: str, variable: str) -> str:
    """Return the network interface with this address, for a variable that the message names.

    gloo itself chooses the interface of the host name, which may be the loopback interface, unreachable for
    other nodes.

    Raises:
        LearnerError: no interface has the address.
    """
    import psutil

    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(known.address == address for known in addresses):
            return name
    raise LearnerError(
        f"no network interface of this node has its cluster address {address}; set {variable} to "
        f"the interface through which the learners reach each other, one of {', '.join(interfaces)}"
    )
