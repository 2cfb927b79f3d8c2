"""The replica coordinator as a Ray actor around ReplicaCoordinator."""

from __future__ import annotations

from typing import Any

import ray

from raylight.store.client import StoreClient
from raylight.weight_sync.coordinator import ReplicaCoordinator

COORDINATOR_NAME = "coordinator"
"""Name of the coordinator's actor, in the run's namespace."""


class CoordinatorActor(ReplicaCoordinator):
    """The coordinator as a Ray actor.

    Args:
        store: receives the names of replicas that are gone, so that it does not wait for their records.
    """

    def __init__(self, store: StoreClient | None) -> None:
        super().__init__(store.lose_recorder if store is not None else None)


def start_coordinator(namespace: str, store: StoreClient | None = None) -> Any:
    """Start the coordinator of an application's replicas and return its actor handle."""
    return (
        ray.remote(CoordinatorActor)
        .options(name=COORDINATOR_NAME, namespace=namespace, num_cpus=0, max_concurrency=1000)
        .remote(store)
    )
