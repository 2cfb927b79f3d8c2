"""The components of a run that trains a policy: beside store and runners, the learners and the serving deployment."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from raylight.agent.resources import LLM
from raylight.aio import together
from raylight.errors import StoreLostError, WeightSyncError
from raylight.learner.batch import TrainBatch
from raylight.learner.group import LearnerGroup, bundles
from raylight.learner.settings import PolicySettings
from raylight.serving.deploy.deployment import Deployment
from raylight.serving.deploy.replica import ReplicaSpec
from raylight.serving.fleet.board import start_board
from raylight.serving.fleet.client import Fleet
from raylight.serving.fleet.parity import START_TOKENS, SYNC_TOKENS, Parity, ParityWatch, probe_ids, vocabulary_of
from raylight.trainer.cluster import place
from raylight.trainer.plan import MODEL_NAME, PolicyPlan, with_policy
from raylight.trainer.session import Session
from raylight.types import TRAINABLE_AGENTS, EnqueueRolloutRequest, FinishedRollout, RolloutMode

CANCEL_TIMEOUT_S = 5.0


class PolicySession(Session):
    """A Session with learners and engines."""

    def __init__(self, plan: PolicyPlan, say: Callable[[str], None], cluster_ends: bool) -> None:
        super().__init__(plan, say, cluster_ends)
        self.plan = plan
        self._vocabulary = vocabulary_of(plan.model_path)
        self._parity = ParityWatch(plan.algorithm.max_logprob_mismatch)
        self._told_of_sleep = False

    async def _start(self) -> None:
        plan = self.plan
        placement = await self._place()
        self._start_store()
        self._board = start_board(plan.name, self.store)
        self._stack.callback(ray.kill, self._board)
        self.fleet = Fleet(self._board)
        self.learners = LearnerGroup(plan.name, plan.learner, placement)
        self._stack.callback(self.learners.stop)
        deployment = self._deployment()
        self._stack.push_async_callback(deployment.stop)
        pool = self._make_pool()
        self._say("starting the engine, the learners and the runners")
        settings = PolicySettings(**{name: getattr(plan.algorithm, name) for name in PolicySettings.model_fields})
        url, _, _ = await together(
            deployment.start(), self.learners.setup(plan.model_path, settings, plan.total_steps, plan.seed), pool.start()
        )
        await self._compare(0, START_TOKENS, plan.algorithm.sync_timeout_s)
        await self._serve_upstreams()  # when Serve is there, and not two at once start it
        await self.store.add_resources(with_policy(self.resources, LLM(endpoint=url, model=MODEL_NAME, traced=True)))
        self._say(f"the model answers at {url}")

    async def _place(self) -> Any:
        config = self.plan.learner
        placement = await place(f"{self.plan.name}-learners", bundles(config), config.strategy, config.placement_timeout_s)
        self._stack.callback(remove_placement_group, placement)
        return placement

    def _deployment(self) -> Deployment:
        plan = self.plan
        spec = ReplicaSpec(
            app_name=plan.name, model_path=plan.model_path, model=MODEL_NAME, config=plan.engine, secret=plan.cargo.secret,
            seed=plan.seed, store=self.store, board=self._board,
        )  # fmt: skip
        return Deployment(spec, self._cluster_ends)

    async def rollout(
        self, tasks: list[Any], mode: RolloutMode, samples: int, progress: Callable[[int, int], None]
    ) -> list[FinishedRollout]:
        """Have every task rolled out `samples` times as one group, and wait until all are decided."""
        requests = [
            EnqueueRolloutRequest(input=task, mode=mode, group_id=f"{mode}-{index}", config=self.plan.algorithm.rollout)
            for index, task in enumerate(tasks)
            for _ in range(samples)
        ]
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
        return await self._collect(ids)

    async def _collect(self, ids: list[str]) -> list[FinishedRollout]:
        """What the rollouts left; with spans only where these tell which agent called."""
        finished = await self.store.collect(ids)
        chosen = [
            item.rollout.rollout_id
            for item in finished
            if self.plan.trained_agents is not None or item.rollout.metadata.get(TRAINABLE_AGENTS)
        ]
        if not chosen:
            return finished
        with_spans = {item.rollout.rollout_id: item for item in await self.store.collect(chosen, with_spans=True)}
        return [with_spans.get(item.rollout.rollout_id, item) for item in finished]

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """One update of the learners, while the engines sleep if they share a device with them."""
        config = self.plan.engine
        if not config.sleep_while_learning:
            return await self.learners.update(batch)
        timeout = self.plan.algorithm.sync_timeout_s
        try:
            for replica, why_not in (await self.fleet.sleep(timeout)).items():
                if why_not and not self._told_of_sleep:
                    self._say(f"engine {replica} does not sleep: {why_not}")
                    self._told_of_sleep = True
            return await self.learners.update(batch)
        finally:
            await self.fleet.wake(timeout)

    async def publish_weights(self, timeout: float) -> tuple[int, Parity]:
        """Bring the learners' weights to every engine; returns their version, which is then what agents sample from, and how far
        the engines' log-probs are from the learners'.

        Raises:
            WeightSyncError: they did not reach every engine in time.
            MismatchError: an engine computes something else than the learners.
        """
        try:
            async with asyncio.timeout(timeout):
                version, box = await self.learners.export()
        except TimeoutError:
            raise WeightSyncError(f"the learners did not give their weights within {timeout:g} s") from None
        await self.fleet.publish(version, box, timeout, self.plan.engine.update_mode)
        return version, await self._compare(version, SYNC_TOKENS, timeout)

    async def _compare(self, version: int, tokens: int, timeout: float) -> Parity:
        """Compare the log-probs of all engines and the learners on a probe."""
        ids = probe_ids(self._vocabulary, tokens, self.plan.seed)
        engines, learner = await together(self.fleet.probe(ids, timeout), self.learners.logprobs(ids))
        return self._parity.check(version, engines, learner)
