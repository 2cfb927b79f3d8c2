"""The replica coordinator as a Ray actor."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raylight._utils.aio import cancel_all
from raylight.ray_metrics.reporter import Measurement, MetricReporter
from raylight.store.client import StoreClient
from raylight.weights.client import CoordinatorClient
from raylight.weights.coordinator import ReplicaCoordinator

COORDINATOR_NAME = "coordinator"
"""Name of the coordinator's actor, in the run's namespace."""


class CoordinatorActor(ReplicaCoordinator):
    """The coordinator as a Ray actor.

    Args:
        store: pickled client of the store, which receives the names of replicas that are gone, so that it
            does not wait for their records.
        replacement_timeout_s: further time for an order while no replica is left.
        min_replicas: number of replicas that must receive new weights, or a new adapter.
        run: name of the run in metrics.
    """

    def __init__(
        self, store: bytes | None, replacement_timeout_s: float, min_replicas: int, run: str
    ) -> None:
        client: StoreClient | None = ray.cloudpickle.loads(store) if store is not None else None
        super().__init__(
            client.lose_recorder if client is not None else None,
            lambda handle: ray.kill(ray.cloudpickle.loads(handle)),
            replacement_timeout_s,
            restored=not ray.get_runtime_context().was_current_actor_reconstructed,
            min_replicas=min_replicas,
        )
        MetricReporter(self._measure, run).start()

    def _measure(self) -> list[Measurement]:
        subscribed, ready = len(self._quorum), self._quorum.ready()
        name = "raylight_subscribed_replicas"
        measured = [
            Measurement(name, ready, {"state": "ready"}),
            Measurement(name, subscribed - ready, {"state": "joining"}),
            Measurement("raylight_evicted_replicas_total", len(self._quorum.evicted)),
        ]
        if self.publication_s is not None:
            measured.append(Measurement("raylight_publication_seconds", self.publication_s))
        return measured


@contextlib.asynccontextmanager
async def running_coordinator(
    namespace: str,
    store: StoreClient | None = None,
    *,
    replacement_timeout_s: float,
    min_replicas: int = 1,
    report: Callable[[str], None] | None = None,
) -> AsyncIterator[CoordinatorClient]:
    """Run a coordinator during the block.

    The actor is bound to this node: it is needed as long as this process, and no longer. If it dies, Ray
    restarts it here, and the client restores it.

    Args:
        replacement_timeout_s: time that Serve may take to replace a lost replica.
        min_replicas: number of replicas that must receive new weights, or a new adapter.
        report: receives messages for the user; None logs them.
    """
    this_node = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    # as bytes: Ray would keep a handle in the object store, from where a restarted actor might not get it
    pickled = None if store is None else ray.cloudpickle.dumps(store)
    handle: Any = (
        ray.remote(CoordinatorActor)
        .options(
            name=COORDINATOR_NAME,
            namespace=namespace,
            num_cpus=0,
            enable_task_events=False,  # as of the store
            max_concurrency=1000,
            max_restarts=-1,  # clients repeat calls themselves: Ray would print each repetition
            scheduling_strategy=this_node,
        )
        .remote(pickled, replacement_timeout_s, min_replicas, namespace)
    )
    warn = logging.getLogger(__name__).warning
    client = CoordinatorClient(handle, replacement_timeout_s, report or warn)
    keeping = asyncio.create_task(client.keep())
    try:
        yield client
    finally:
        await cancel_all([keeping])
        ray.kill(handle)
