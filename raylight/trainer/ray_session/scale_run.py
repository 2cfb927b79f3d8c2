"""`raylight scale`: change the number of runners and engine replicas of a run in progress."""

from __future__ import annotations

import asyncio
import contextlib
import os
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util import list_named_actors

from raylight.errors import ConfigError, ScaleError, StoreLostError
from raylight.runner.external_runners import RENDEZVOUS_NAME
from raylight.runner.pool import RUNNER_PREFIX
from raylight.store.actor import STORE_NAME
from raylight.store.client import StoreClient
from raylight.trainer.ray_session.connection import ray_session, running_cluster
from raylight.trainer.ray_session.local_cluster import is_reachable

ANSWER_TIMEOUT_S = 30.0
"""Time in which a runner that has the run's store must respond."""


def scale_run(run: str, sizes: dict[str, int], address: str | None, timeout_s: float) -> None:
    """Change the sizes of a run's components, wait until they are reached, and print them.

    Args:
        run: name of the run.
        sizes: wanted numbers of "runners" and "replicas".
        timeout_s: longest wait; the run goes on trying after it.

    Raises:
        ConfigError: the cluster has no such run.
        ScaleError: a size was not reached, or not in time.
    """
    given = address or os.environ.get("RAY_ADDRESS")
    found = running_cluster() if given in (None, "", "auto") else given
    if found in (None, "local") or not is_reachable(found):
        where = "was found on this machine" if found is None else f"is reachable at {found!r}"
        raise ConfigError(
            f"run {run!r} cannot be scaled: no Ray cluster {where}; give the address of the run's cluster, "
            "which its first lines show: --address host:port, with RAY_AUTH_MODE=token if it has a token"
        )
    with ray_session(address, log_to_driver=False):
        reply = asyncio.run(_ask(run, sizes, timeout_s))
    failures = []
    for name, change in reply.items():
        if "before" in change:
            print(f"{name}: {change['before']} -> {change['after']}")
        if change["error"]:
            failures.append(change["error"])
    if failures:
        raise ScaleError("; ".join(failures))


async def _ask(run: str, sizes: dict[str, int], timeout_s: float) -> dict[str, dict]:
    store = await _store_of(run)
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


async def _store_of(run: str) -> StoreClient:
    """Return a client of a run's store: of the run's own one, or of the user's, which the runners know.

    Raises:
        ConfigError: no run of this name is on the connected cluster.
        ScaleError: the run has a store of the user's, and none of its runners responds.
    """
    actors = list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == run]
    if STORE_NAME in names:
        return StoreClient(ray.get_actor(STORE_NAME, namespace=run))
    if RENDEZVOUS_NAME in names:
        return (await _first_answer(run, [RENDEZVOUS_NAME], "access")).store
    if runners := [name for name in names if name.startswith(RUNNER_PREFIX)]:
        return await _first_answer(run, runners, "store")
    runs = {a["namespace"] for a in actors if a["name"].startswith((RUNNER_PREFIX, RENDEZVOUS_NAME))}
    found = f"it has: {', '.join(sorted(runs))}" if runs else "it has no run in progress"
    raise ConfigError(f"the cluster has no run {run!r}; {found}. A run shows its name at its start")


async def _first_answer(run: str, names: list[str], method: str) -> Any:
    """Call a method of a run's actors, and return the first answer."""
    calls = []
    for name in names:
        with contextlib.suppress(ValueError):  # it has ended
            calls.append(getattr(ray.get_actor(name, namespace=run), method).remote())
    for call in asyncio.as_completed(map(asyncio.ensure_future, calls), timeout=ANSWER_TIMEOUT_S):
        with contextlib.suppress(RayActorError, TimeoutError):
            return await call
    raise ScaleError(
        f"no runner of run {run} responds within {ANSWER_TIMEOUT_S:g} s, and only they know its store, which "
        "is not its own; try again when they respond"
    )
