"""A served model without runners and learners, for tests of replicas and their coordinator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import ray
from ray.util.state import list_actors

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.config import EngineConfig, StoreConfig
from raylight.quickstart import STARTER_MODEL
from raylight.serving.deploy.deployment import Deployment
from raylight.serving.deploy.replica import ReplicaSettings
from raylight.store.actor import start_store
from raylight.store.client import StoreClient
from raylight.types import EnqueueRolloutRequest, Rollout
from raylight.weight_sync.actor import RunningCoordinator

SECRET = "the run's secret"
NAME = "replicas-test"


@dataclass
class Served:
    store: StoreClient
    coordinator: RunningCoordinator
    url: str

    def client(self, rollout: Rollout, retries: int = 0, key_of: Rollout | None = None) -> openai.AsyncOpenAI:
        base = f"{self.url}{attempt_path(*ids(rollout))}/v1"
        key = attempt_key(SECRET, *ids(key_of or rollout))
        return openai.AsyncOpenAI(base_url=base, api_key=key, max_retries=retries, timeout=60)

    async def rollouts(self, count: int) -> list[Rollout]:
        await self.store.enqueue_many_rollouts(
            [EnqueueRolloutRequest(input=i, mode="train") for i in range(count)]
        )
        return await self.store.dequeue_many_rollouts(limit=count, worker_id="test")


def ids(rollout: Rollout) -> tuple[str, str]:
    return rollout.rollout_id, rollout.attempt.attempt_id


@asynccontextmanager
async def served(folder: Path, kind: str = "transformers", **config: Any) -> AsyncIterator[Served]:
    """Start a store, a coordinator and the engine's replicas, without runners and learners."""
    actor = start_store(NAME, str(folder / "store.db"), StoreConfig(lease_seconds=600))
    store = StoreClient(actor)
    async with RunningCoordinator(NAME, store, replacement_timeout_s=60) as coordinator:
        spec = ReplicaSettings(
            app_name=NAME,
            model_path=STARTER_MODEL,
            model="policy",
            config=EngineConfig(kind=kind, **config),
            secret=SECRET,
            seed=0,
            store=store,
            coordinator=coordinator.handle,
        )
        deployment = Deployment(spec, cluster_ends=False)
        try:
            yield Served(store, coordinator, await deployment.start())
        finally:
            await deployment.stop()
    await actor.close.remote()
    ray.kill(actor)


def replica_pid(replica: str) -> int:
    (found,) = [
        a
        for a in list_actors(filters=[("state", "=", "ALIVE")], detail=True, limit=1000)
        if replica in (a.name or "")
    ]
    return found.pid
