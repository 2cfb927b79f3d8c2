"""The store as a Ray actor: a thin shell around StoreService that starts again where it was when it is killed."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylight.config import StoreConfig
from raylight.store.service import StoreService

STORE_NAME = "store"


class StoreActor(StoreService):
    """Holds rollouts, spans and generations of one run; asynchronous, so that long polls do not block one another."""


def start_store(namespace: str, path: str, config: StoreConfig) -> Any:
    """Start the run's store and return its actor handle.

    It stays on this node, where its file is. When it dies it starts again there, and what had no answer is asked again by Ray.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return (
        ray.remote(StoreActor)
        .options(
            name=STORE_NAME,
            namespace=namespace,
            num_cpus=0,
            max_concurrency=10_000,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=here,
        )
        .remote(path, config)
    )
