"""Draining nodes, which will leave the cluster: a spot node with notice, or by `ray drain-node`."""

from __future__ import annotations

import time

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module

GCS_TIMEOUT_S = 5.0
MARGIN_S = 5.0
"""Seconds before the end of a node at which its runners must have given back their rollouts."""


def draining_nodes() -> dict[str, float | None]:
    """Return the ids of the draining nodes, with the seconds until each ends; None if it has no deadline.

    No public function of Ray shows them; Ray Serve reads them in this way too.

    Raises:
        RpcError: the GCS did not respond.
    """
    client = GcsClient(address=ray.get_runtime_context().gcs_address)
    found: dict[str, int] = client.get_draining_nodes(timeout=GCS_TIMEOUT_S)
    return {node: deadline / 1000 - time.time() if deadline else None for node, deadline in found.items()}


def grace_seconds(patience_s: float, remaining_s: float | None) -> float:
    """Return the seconds that runners of a draining node have for finishing their rollouts.

    Args:
        patience_s: longest time.
        remaining_s: seconds until the node ends; None if it has no deadline.
    """
    return patience_s if remaining_s is None else max(min(patience_s, remaining_s - MARGIN_S), 0.0)
