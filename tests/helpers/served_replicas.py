"""A served model without runners and learners, for tests of replicas and their coordinator."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import ray
from ray.util.state import list_actors
from weight_loading import DictSource

from raylight.agent.attempt_keys import attempt_key, attempt_path
from raylight.config import EngineConfig, StoreConfig
from raylight.errors import TransferBrokenError
from raylight.quickstart import STARTER_MODEL
from raylight.serving.deploy.deployment import Deployment
from raylight.serving.deploy.replica import ReplicaSettings
from raylight.store.actor import start_store
from raylight.store.client import StoreClient
from raylight.types import EnqueueRolloutRequest, Rollout
from raylight.weights.actor import running_coordinator
from raylight.weights.client import CoordinatorClient
from raylight.weights.gloo import GlooSender
from raylight.weights.protocol import SenderSettings
from raylight.weights.sender import PublicationSettings, SenderClient

SECRET = "the run's secret"
NAME = "replicas-test"


@dataclass
class Served:
    store: StoreClient
    coordinator: CoordinatorClient
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
    actor = start_store(NAME, str(folder / "store.db"), StoreConfig(lease_s=600))
    store = StoreClient(actor)
    async with running_coordinator(NAME, store, replacement_timeout_s=60) as coordinator:
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


async def publish_weights(
    model: Served, version: int, weights: Mapping[str, Any], timeout_s: float = 60.0
) -> int:
    """Publish weights, which this process sends; return the number of replicas that have them."""
    token = uuid.uuid4().hex
    publishing = asyncio.create_task(model.coordinator.publish(version, None, timeout_s, token=token))
    sending = asyncio.create_task(asyncio.to_thread(_send, model, version, token, weights, timeout_s))
    try:
        return len(await publishing)
    finally:
        await sending


async def serve_joined(model: Served, version: int, weights: Mapping[str, Any], replicas: int) -> None:
    """Wait until a number of replicas have caught up, and send the current weights to those that join."""
    keeper = model.coordinator
    waiting = asyncio.ensure_future(model.coordinator.handle.wait_for_replicas.remote(replicas))
    waiting.add_done_callback(lambda _: keeper.changed.notify_all())
    while not waiting.done():
        await keeper.changed.wait_for(lambda: waiting.done() or bool(keeper.lacking))
        if keeper.lacking:
            await asyncio.to_thread(_send, model, version, "", weights, 60.0)


def _send(model: Served, version: int, token: str, weights: Mapping[str, Any], timeout_s: float) -> None:
    """Send weights to the replicas that lack them, as learners do."""
    client = SenderClient(
        PublicationSettings("gloo", "float32", "module", timeout_s, 60.0, model.coordinator.handle)
    )
    while members := client.begin(version, token):
        workers = tuple(member.workers for member in members)
        with contextlib.suppress(TransferBrokenError, ConnectionError):
            sender = GlooSender(
                SenderSettings(0, "127.0.0.1", workers, timeout_s), client, DictSource(weights)
            )
            sender.send_weights()
            sender.shutdown()


def replica_pid(replica: str) -> int:
    (found,) = [
        a
        for a in list_actors(filters=[("state", "=", "ALIVE")], detail=True, limit=1000)
        if replica in (a.name or "")
    ]
    return found.pid
