"""The replica coordinator as a Ray actor around ReplicaCoordinator."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylight.aio import cancel_all
from raylight.store.client import StoreClient
from raylight.weight_sync.client import CoordinatorClient
from raylight.weight_sync.coordinator import ReplicaCoordinator
from raylight.weight_sync.keeper import CoordinatorKeeper

COORDINATOR_NAME = "coordinator"
"""Name of the coordinator's actor, in the run's namespace."""


class CoordinatorActor(ReplicaCoordinator):
    """The coordinator as a Ray actor.

    Args:
        store: pickled client of the store, which receives the names of replicas that are gone, so that it
            does not wait for their records.
        replacement_timeout_s: further time for an order while no replica is left.
    """

    def __init__(self, store: bytes | None, replacement_timeout_s: float) -> None:
        client: StoreClient | None = ray.cloudpickle.loads(store) if store is not None else None
        super().__init__(
            client.lose_recorder if client is not None else None,
            ray.kill,
            replacement_timeout_s,
            restored=not ray.get_runtime_context().was_current_actor_reconstructed,
        )


@dataclass(frozen=True)
class RunningCoordinator:
    """A coordinator with its client and keeper in this process.

    Attributes:
        handle: handle of the actor, for the replicas.
    """

    handle: Any
    client: CoordinatorClient
    keeper: CoordinatorKeeper


@contextlib.asynccontextmanager
async def running_coordinator(
    namespace: str,
    store: StoreClient | None = None,
    *,
    replacement_timeout_s: float,
    report: Callable[[str], None] | None = None,
) -> AsyncIterator[RunningCoordinator]:
    """Run the coordinator of an application's replicas.

    The actor is bound to this node: it is needed as long as this process, and no longer. If it dies, Ray
    restarts it here, and the keeper restores it.

    Args:
        replacement_timeout_s: time that Serve may take to replace a lost replica.
        report: receives messages for the user; None logs them.
    """
    # as bytes: Ray would keep a handle in the object store, from where a restarted actor might not get it
    pickled = None if store is None else ray.cloudpickle.dumps(store)
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor: Any = (
        ray.remote(CoordinatorActor)
        .options(
            name=COORDINATOR_NAME,
            namespace=namespace,
            num_cpus=0,
            max_concurrency=1000,
            max_restarts=-1,  # clients repeat calls themselves: Ray would print each repetition
            scheduling_strategy=this_node,
        )
        .remote(pickled, replacement_timeout_s)
    )
    keeper = CoordinatorKeeper(actor, report or logging.getLogger(__name__).warning)
    following = asyncio.create_task(keeper.run())
    try:
        yield RunningCoordinator(
            actor, CoordinatorClient(actor, keeper.update, replacement_timeout_s), keeper
        )
    finally:
        await cancel_all([following])
        ray.kill(actor)
