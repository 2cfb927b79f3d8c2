"""The components of a run that serves a model to agents: store, runners and the serving deployment. Nothing
is trained."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from raylight.agent.resources import LLM, NamedResources
from raylight.aio import task_group
from raylight.errors import StoreLostError
from raylight.serving.deploy.deployment import Deployment
from raylight.serving.deploy.replica import ReplicaSettings
from raylight.trainer.cluster_monitor import is_cluster_lost
from raylight.trainer.plan import MODEL_NAME, ServedPlan, with_policy
from raylight.trainer.session import Session
from raylight.types import EnqueueRolloutRequest, RolloutMode
from raylight.weight_sync.actor import RunningCoordinator
from raylight.weight_sync.client import CoordinatorClient

CANCEL_TIMEOUT_S = 5.0


class ServedSession(Session):
    """A Session with engines."""

    plan: ServedPlan
    replicas: CoordinatorClient
    _coordinator: RunningCoordinator

    async def _start(self) -> None:
        self._start_store()
        await self._start_coordinator()
        deployment = self._make_deployment()
        pool = self._make_pool()
        self._show_stage("starting the engine and the runners")
        async with task_group() as tasks:
            serving = tasks.create_task(deployment.start())
            tasks.create_task(pool.start())
        llm = LLM(endpoint=serving.result(), model=await self._served_name(), traced=True)
        await self._publish_resources(llm)

    async def _served_name(self) -> str:
        """Return the model name that agents send, once the engines are up."""
        return MODEL_NAME

    async def _start_coordinator(self) -> None:
        running = RunningCoordinator(
            self.plan.name,
            self.store,
            replacement_timeout_s=self.plan.engine.start_timeout_s,
            min_replicas=self.plan.engine.min_replicas,
            report=self._show_stage,
        )
        self._coordinator = await self._stack.enter_async_context(running)
        self.replicas = self._coordinator.client

    async def counts(self) -> dict[str, int]:
        keeper = self._coordinator.keeper
        return {
            **await super().counts(),
            "replicas_evicted": keeper.evictions,
            "coordinator_restarts": keeper.restarts,
        }

    def _make_deployment(
        self, seed: int | None = None, training_temperature: float | None = None
    ) -> Deployment:
        """Return the serving deployment, whose seed is the run's unless another is given.

        Args:
            training_temperature: of all calls of training rollouts; None leaves the sampling to the agents.
        """
        plan = self.plan
        spec = ReplicaSettings(
            app_name=plan.name,
            model_path=plan.model_path,
            model=MODEL_NAME,
            config=plan.engine,
            secret=plan.payload.secret,
            seed=plan.seed if seed is None else seed,
            store=self.store,
            coordinator=self._coordinator.handle,
            training_temperature=training_temperature,
        )
        deployment = Deployment(spec, self._owns_cluster, plan.runner.n * plan.runner.max_concurrent)
        self._stack.push_async_callback(deployment.stop)
        return deployment

    async def _publish_resources(self, llm: LLM) -> None:
        """Store the resources, with the served model among them, for agents to use."""
        await self._serve_traced_upstreams()  # after the deployment: two must not start Serve at once
        keeper = self._coordinator.keeper
        self._monitor_serving(self.plan.name, llm.endpoint, self.plan.engine, lambda: keeper.live_replicas)
        await self.store.add_resources(self._resources_with(llm))
        self._show_stage(f"the model is served at {llm.endpoint}")

    def _resources_with(self, llm: LLM) -> NamedResources:
        return with_policy(self.resources, llm)

    async def run_tasks(
        self, tasks: list[Any], mode: RolloutMode, samples: int, progress: Callable[[int, int], None]
    ) -> list[str]:
        """Roll every task out `samples` times as one group; return the rollout ids, ordered by task, when all
        are decided.

        Args:
            progress: called with the number of decided rollouts and their total.
        """
        requests = [
            EnqueueRolloutRequest(input=task, mode=mode, group_id=f"{mode}-{index}", config=self.plan.rollout)
            for index, task in enumerate(tasks)
            for _ in range(samples)
        ]
        return await self._run_requests(requests, progress)

    async def _run_requests(
        self, requests: list[EnqueueRolloutRequest], progress: Callable[[int, int], None]
    ) -> list[str]:
        outages = self.outages
        ids = [rollout.rollout_id for rollout in await self.store.enqueue_many_rollouts(requests)]
        try:
            while True:
                await self._wait_for_rollouts(ids, progress)
                confirmed = await self.confirm_serving()
                if confirmed == outages:
                    return ids
                outages = confirmed
        except asyncio.CancelledError:
            if is_cluster_lost():
                raise
            with contextlib.suppress(TimeoutError, StoreLostError):  # the run ends in any case
                await asyncio.wait_for(self.store.cancel_rollouts(ids), CANCEL_TIMEOUT_S)
            raise

    async def _wait_for_rollouts(self, ids: list[str], progress: Callable[[int, int], None]) -> None:
        done = 0
        while done < len(ids):
            at_least = min(done + max(len(ids) // 20, 1), len(ids))
            done = len(await self.store.wait_for_rollouts(rollout_ids=ids, at_least=at_least))
            progress(done, len(ids))
