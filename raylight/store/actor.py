"""The store as a Ray actor around StoreService.

When it is killed it starts again with the state of its file.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylight._utils.garbage import freeze_startup_objects
from raylight.config import StoreConfig
from raylight.store.service import StoreService

STORE_NAME = "store"


class StoreActor(StoreService):
    """Rollouts, spans and generations of one run.

    The actor is asynchronous, so that long polls do not block one another.
    """

    def __init__(self, path: str, config: StoreConfig) -> None:
        super().__init__(path, config)
        freeze_startup_objects()


def start_store(namespace: str, path: str, config: StoreConfig) -> Any:
    """Start the store of a run and return its actor handle.

    The actor is bound to this node, where its file is. If it dies, Ray restarts it here and repeats the calls
    without a response.
    """
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return (
        ray.remote(StoreActor)
        .options(
            name=STORE_NAME,
            namespace=namespace,
            num_cpus=0,
            enable_task_events=False,  # Ray would keep 100,000 of its calls in memory, for `ray list tasks`
            max_concurrency=10_000,
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=this_node,
        )
        .remote(path, config)
    )
