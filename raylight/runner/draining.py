"""Draining nodes, which will leave the cluster: a spot node with notice, or by `ray drain-node`."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator

import ray
from ray._raylet import GcsClient  # type: ignore[attr-defined]  # a compiled module
from ray.exceptions import RpcError

from raylight._utils.aio import pause

logger = logging.getLogger(__name__)

GCS_TIMEOUT_S = 5.0
CHECK_S = 2.0
"""Interval at which draining nodes are looked up."""
MARGIN_S = 5.0
"""Seconds before the end of a node at which its runners must have given back their rollouts."""


async def watch_draining_nodes() -> AsyncIterator[dict[str, float | None]]:
    """Yield the draining nodes, as `draining_nodes` returns them, whenever there are some at an interval. Ray
    sends no event for them."""
    while True:
        await pause(CHECK_S)
        try:
            draining = await asyncio.to_thread(draining_nodes)
        except RpcError as error:  # the cluster's monitor reports a GCS that stays away
            logger.debug("the draining nodes are unknown: %s", error)
            continue
        if draining:
            yield draining


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
