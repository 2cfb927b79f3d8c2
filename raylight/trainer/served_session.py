"""The components of a run that serves a model to agents: beside store and runners, the serving deployment. Nothing here trains."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import ray

from raylight.agent.resources import LLM, NamedResources
from raylight.aio import task_group
from raylight.errors import StoreLostError
from raylight.serving.deploy.deployment import Deployment
from raylight.serving.deploy.replica import ReplicaSettings
from raylight.trainer.plan import MODEL_NAME, ServedPlan, with_policy
from raylight.trainer.session import Session
from raylight.types import EnqueueRolloutRequest, RolloutMode
from raylight.weight_sync.client import CoordinatorClient
from raylight.weight_sync.coordinator import start_coordinator

CANCEL_TIMEOUT_S = 5.0


class ServedSession(Session):
    """A Session with engines."""

    plan: ServedPlan
    fleet: CoordinatorClient

    def __init__(self, plan: ServedPlan, say: Callable[[str], None], cluster_ends: bool) -> None:
        super().__init__(plan, say, cluster_ends)
        self.plan = plan

    async def _start(self) -> None:
        self._start_store()
        self._start_board()
        deployment = self._make_deployment()
        pool = self._make_pool()
        self._say("starting the engine and the runners")
        async with task_group() as tasks:
            serving = tasks.create_task(deployment.start())
            tasks.create_task(pool.start())
        await self._offer(LLM(endpoint=serving.result(), model=await self._served_name(), traced=True))

    async def _served_name(self) -> str:
        """The name of what agents are to call, once the engines are up."""
        return MODEL_NAME

    def _start_board(self) -> None:
        self._coordinator = start_coordinator(self.plan.name, self.store)
        self._stack.callback(ray.kill, self._coordinator)
        self.fleet = CoordinatorClient(self._coordinator)

    def _make_deployment(self) -> Deployment:
        plan = self.plan
        spec = ReplicaSettings(
            app_name=plan.name,
            model_path=plan.model_path,
            model=MODEL_NAME,
            config=plan.engine,
            secret=plan.payload.secret,
            seed=plan.seed,
            store=self.store,
            coordinator=self._coordinator,
        )
        deployment = Deployment(spec, self._cluster_ends)
        self._stack.push_async_callback(deployment.stop)
        return deployment

    async def _offer(self, llm: LLM) -> None:
        """Give the served model to agents."""
        await self._serve_upstreams()  # when Serve is there, and not two at once start it
        await self.store.add_resources(self._resources_with(llm))
        self._say(f"the model answers at {llm.endpoint}")

    def _resources_with(self, llm: LLM) -> NamedResources:
        return with_policy(self.resources, llm)

    async def finish(
        self, tasks: list[Any], mode: RolloutMode, samples: int, progress: Callable[[int, int], None]
    ) -> list[str]:
        """Have every task rolled out `samples` times as one group, and wait until all are decided; returns their ids, by task."""
        requests = [
            EnqueueRolloutRequest(input=task, mode=mode, group_id=f"{mode}-{index}", config=self.plan.rollout)
            for index, task in enumerate(tasks)
            for _ in range(samples)
        ]
        return await self._finish(requests, progress)

    async def _finish(
        self, requests: list[EnqueueRolloutRequest], progress: Callable[[int, int], None]
    ) -> list[str]:
        ids = [rollout.rollout_id for rollout in await self.store.enqueue_many_rollouts(requests)]
        done = 0
        try:
            while done < len(ids):
                wanted = min(done + max(len(ids) // 20, 1), len(ids))
                done = len(await self.store.wait_for_rollouts(rollout_ids=ids, at_least=wanted))
                progress(done, len(ids))
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError, StoreLostError):  # the run ends anyway
                await asyncio.wait_for(self.store.cancel_rollouts(ids), CANCEL_TIMEOUT_S)
            raise
        return ids
