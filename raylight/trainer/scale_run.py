"""`raylight scale`: change the number of runners and engine replicas of a run in progress."""

from __future__ import annotations

import asyncio
import os

import ray
from ray.util import list_named_actors

from raylight.errors import ConfigError, ScaleError, StoreLostError
from raylight.store.actor import STORE_NAME
from raylight.store.client import StoreClient
from raylight.trainer.cluster import ray_session, running_cluster


def scale_run(run: str, sizes: dict[str, int], address: str | None, timeout_s: float) -> None:
    """Change the sizes of a run's components, wait until they are reached, and print them.

    Args:
        run: name of the run.
        sizes: wanted numbers of "runners" and "replicas".
        timeout_s: longest wait; the run goes on trying after it.

    Raises:
        ConfigError: there is no such run on the cluster.
        ScaleError: a size was not reached, or not in time.
    """
    if not (address or os.environ.get("RAY_ADDRESS") or running_cluster()):
        raise ConfigError(
            f"run {run!r} cannot be scaled: no Ray cluster was found on this machine; give the address of "
            "the run's cluster, which its first lines show: --address host:port, with RAY_AUTH_MODE=token if "
            "it has a token"
        )
    with ray_session(address, log_to_driver=False):
        reply = asyncio.run(_ask(_store_of(run), run, sizes, timeout_s))
    failures = []
    for name, change in reply.items():
        if "before" in change:
            print(f"{name}: {change['before']} -> {change['after']}")
        if change["error"]:
            failures.append(change["error"])
    if failures:
        raise ScaleError("; ".join(failures))


async def _ask(store: StoreClient, run: str, sizes: dict[str, int], timeout_s: float) -> dict[str, dict]:
    try:
        reply = await store.ask_driver(run, sizes, timeout_s)
    except StoreLostError:
        raise ScaleError(f"run {run} ended before it was scaled") from None
    if reply is None:
        raise ScaleError(
            f"run {run} has not reached the size within {timeout_s:g} s (--timeout). It goes on trying if it "
            "has begun to train: see its output"
        )
    return reply


def _store_of(run: str) -> StoreClient:
    """Return a client of a run's store.

    Raises:
        ConfigError: no run of this name has a store on the connected cluster.
    """
    try:
        return StoreClient(ray.get_actor(STORE_NAME, namespace=run))
    except ValueError:
        actors = list_named_actors(all_namespaces=True)
        runs = sorted(actor["namespace"] for actor in actors if actor["name"] == STORE_NAME)
        found = f"it has: {', '.join(runs)}" if runs else "it has no run in progress"
        raise ConfigError(
            f"the cluster has no run {run!r} with a store of its own; {found}. A run shows its name at its "
            "start"
        ) from None
