"""The components of a run: started together, watched, and stopped in order, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from ray.util.placement_group import remove_placement_group

from raylight.agent.litagent import LitAgent
from raylight.agent.resources import LLM, NamedResources
from raylight.aio import together
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.config import EngineConfig, LearnerConfig, RunnerConfig
from raylight.errors import StoreLostError, WeightSyncError
from raylight.learner.group import LearnerGroup, bundles
from raylight.learner.settings import PolicySettings
from raylight.runner.pool import RunnerPool
from raylight.serving.deploy import Deployment
from raylight.serving.replica import ReplicaSpec
from raylight.serving.weights import start_weights
from raylight.store.actor import start_store
from raylight.store.client import StoreClient
from raylight.trainer.cluster import place
from raylight.types import FinishedRollout, RolloutMode, RolloutRequest

logger = logging.getLogger(__name__)
T = TypeVar("T")

CANCEL_TIMEOUT_S = 5.0
MODEL_NAME = "policy"
"""The name under which the trained model is served."""


@dataclass(frozen=True)
class RunPlan:
    """Everything that a run is made of, resolved and checked."""

    name: str
    """Also the Ray namespace of its actors and the name of its Serve application."""
    model_path: str
    algorithm: PolicyAlgorithm
    engine: EngineConfig
    learner: LearnerConfig
    runner: RunnerConfig
    resources: NamedResources
    seed: int
    total_steps: int


class Session:
    """The running components of one run. Use `async with`; leaving it stops everything that was started."""

    def __init__(self, plan: RunPlan, agent: LitAgent, say: Callable[[str], None], cluster_ends: bool) -> None:
        self.plan = plan
        self._cluster_ends = cluster_ends
        self._agent = agent
        self._say = say
        self._stack = contextlib.AsyncExitStack()
        self._secret = secrets.token_hex(16)

    async def __aenter__(self) -> Session:
        try:
            await self._start()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: Any) -> None:
        try:
            await self._stack.aclose()  # goes on with the others when one fails
        except Exception:  # what the run itself raised or returned matters more
            logger.exception("cleaning up after %s failed in part", self.plan.name)

    async def _start(self) -> None:
        plan = self.plan
        placement = await self._place()
        self._store_actor = start_store(plan.name)
        self._stack.callback(ray.kill, self._store_actor)
        self._weights = start_weights(plan.name)
        self._stack.callback(ray.kill, self._weights)
        self.store = StoreClient(self._store_actor)
        self.learners = LearnerGroup(plan.name, plan.learner, placement)
        self._stack.callback(self.learners.stop)
        deployment = self._deployment()
        self._stack.push_async_callback(deployment.stop)
        self.pool = RunnerPool(plan.name, plan.runner, self._store_actor, self._agent, self._secret)
        self._stack.callback(self.pool.stop)
        self._say("starting the engine, the learners and the runners")
        settings = PolicySettings(**{name: getattr(plan.algorithm, name) for name in PolicySettings.model_fields})
        url, _, _ = await together(
            deployment.start(), self.learners.setup(plan.model_path, settings, plan.total_steps, plan.seed), self.pool.start()
        )
        llm = LLM(endpoint=url, model=MODEL_NAME, traced=True)
        await self.store.add_resources({"llm": llm, **plan.resources})
        self._say(f"the model answers at {url}")

    async def _place(self) -> Any:
        config = self.plan.learner
        placement = await place(f"{self.plan.name}-learners", bundles(config), config.strategy, config.placement_timeout_s)
        self._stack.callback(remove_placement_group, placement)
        return placement

    def _deployment(self) -> Deployment:
        plan = self.plan
        spec = ReplicaSpec(
            app_name=plan.name, model_path=plan.model_path, model=MODEL_NAME, config=plan.engine, secret=self._secret,
            seed=plan.seed, store=self._store_actor, weights=self._weights,
        )  # fmt: skip
        return Deployment(spec, self._cluster_ends)

    async def watched(self, work: Awaitable[T]) -> T:
        """Do the run's work; if the runners fail for good meanwhile, raise that instead of waiting forever."""
        working: asyncio.Task[Any] = asyncio.ensure_future(work)
        watching = asyncio.create_task(self.pool.watch())
        try:
            await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                await watching
            return await working
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def rollout(
        self, tasks: list[Any], mode: RolloutMode, samples: int, progress: Callable[[int, int], None]
    ) -> list[FinishedRollout]:
        """Have every task rolled out `samples` times as one group, and wait until all are decided."""
        requests = [
            RolloutRequest(input=task, mode=mode, group_id=f"{mode}-{index}", config=self.plan.algorithm.rollout)
            for index, task in enumerate(tasks)
            for _ in range(samples)
        ]
        ids = [rollout.rollout_id for rollout in await self.store.enqueue(requests)]
        done = 0
        try:
            while done < len(ids):
                done = len(await self.store.wait_for_rollouts(ids, at_least=min(done + max(len(ids) // 20, 1), len(ids))))
                progress(done, len(ids))
        except asyncio.CancelledError:
            with contextlib.suppress(TimeoutError, StoreLostError):  # the run ends anyway
                await asyncio.wait_for(self.store.cancel(ids), CANCEL_TIMEOUT_S)
            raise
        return await self.store.collect(ids)

    async def publish_weights(self, timeout: float) -> int:
        """Bring the learners' weights to every engine; returns their version, which is then what agents sample from."""
        version, box = await self.learners.export()
        try:
            await self._weights.publish.remote(version, box, timeout)
        except RayTaskError as error:
            raise error.cause from None
        except RayActorError as error:
            raise WeightSyncError(f"the weights actor is gone: {error}") from None
        return version
