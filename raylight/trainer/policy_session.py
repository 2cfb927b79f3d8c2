"""The components of a run that trains a policy: beside store and runners, the learners and the serving deployment.

Its rollouts have names that tell their step, so that a step that is taken again finds in the store what it had.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

from ray.util.placement_group import remove_placement_group

from raylight.agent.resources import LLM
from raylight.aio import task_group
from raylight.config import StoreConfig
from raylight.errors import LearnerError, LearnerLostError, WeightSyncError
from raylight.experience.batch import TrainBatch
from raylight.experience.checkpoints import TrainingStates
from raylight.experience.settings import PolicySettings
from raylight.learner.group import LearnerGroup, bundles
from raylight.trainer.cluster import place
from raylight.trainer.parity import (
    START_TOKENS,
    SYNC_TOKENS,
    Parity,
    ParityWatch,
    probe_ids,
    vocabulary_of,
)
from raylight.trainer.plan import MODEL_NAME, PolicyPlan, with_greedy
from raylight.trainer.resume import ResumePoint, place_of, wait_for_store
from raylight.trainer.served_session import ServedSession
from raylight.types import (
    FINISHED,
    GREEDY,
    TRAINABLE_AGENTS,
    EnqueueRolloutRequest,
    FinishedRollout,
    RolloutMode,
    RolloutStatus,
)


class PolicySession(ServedSession):
    """A ServedSession with learners."""

    plan: PolicyPlan

    def __init__(
        self, plan: PolicyPlan, say: Callable[[str], None], cluster_ends: bool, start: ResumePoint
    ) -> None:
        super().__init__(plan, say, cluster_ends)
        self.start = start
        self._continues = start.own
        self.replaying = not start.is_new
        """Steps are taken again with rollouts of the store, and engines need no weights until something is sampled."""
        self.restarts = 0
        """Times that the learners were lost and started anew."""
        self.version = start.version
        """Of the learners' weights."""
        self._published = 0
        self._step = start.step
        self._catching_up = asyncio.Lock()
        self._taken_back: set[str] = set()
        """Rollouts that the run before left undecided."""
        self._vocabulary = vocabulary_of(plan.model_path)
        self._parity = ParityWatch(plan.algorithm.max_logprob_mismatch)
        self._told_of_sleep = False
        self._greedy_id: str | None = None
        """Resources of rollouts that take the most probable tokens."""

    async def _start(self) -> None:
        plan = self.plan
        placement = await self._place()
        if self._continues and isinstance(plan.store, StoreConfig):
            await wait_for_store(Path(plan.store_path))
        self._start_store()
        if self._continues:
            await self._cancel_undecided()
        self._start_board()
        self.learners = LearnerGroup(plan.name, plan.learner, placement)
        self._stack.callback(self.learners.stop)
        deployment = self._make_deployment()
        pool = self._make_pool()
        self._say("starting the engine, the learners and the runners")
        settings = PolicySettings(
            **{name: getattr(plan.algorithm, name) for name in PolicySettings.model_fields}
        )
        async with task_group() as tasks:
            serving = tasks.create_task(deployment.start())
            tasks.create_task(self.learners.setup(plan.model_path, settings, plan.total_steps, plan.seed))
            tasks.create_task(pool.start())
        await self._compare(0, START_TOKENS, plan.algorithm.sync_timeout_s)
        llm = LLM(
            endpoint=serving.result(),
            model=MODEL_NAME,
            traced=True,
            sampling_parameters=plan.algorithm.sampling_parameters,
        )
        await self._offer(llm)
        if plan.algorithm.needs_greedy_rollouts:
            self._greedy_id = await self._add_greedy_model()
        if not self.start.is_new:
            await self.learners.load_state(self.start.url, self.start.step, self.version)

    async def _cancel_undecided(self) -> None:
        """Take back what the run before left undecided: its model is not the engines', until the steps since are taken again."""
        undecided = [status for status in get_args(RolloutStatus) if status not in FINISHED]
        for lineage in filter(None, (self.start.lineage, self.start.before)):
            left = await self.store.query_rollouts(rollout_id_contains=lineage, status_in=undecided)
            await self.store.cancel_rollouts([rollout.rollout_id for rollout in left])
            cancelled = await self.store.query_rollouts(rollout_id_contains=lineage, status_in=["cancelled"])
            self._taken_back |= {rollout.rollout_id for rollout in cancelled}

    async def _place(self) -> Any:
        config = self.plan.learner
        placement = await place(
            f"{self.plan.name}-learners", bundles(config), config.strategy, config.placement_timeout_s
        )
        self._stack.callback(remove_placement_group, placement)
        return placement

    def set_step(self, step: int) -> None:
        """What is rolled out from now on is of this step, unless it says otherwise."""
        self._step = step

    async def rollout(
        self,
        tasks: list[Any],
        mode: RolloutMode,
        samples: int,
        progress: Callable[[int, int], None],
        step: int | None = None,
        part: int = 0,
    ) -> list[FinishedRollout]:
        """Have every task rolled out `samples` times as one group, and wait until all are decided. Those of this step and part that
        the store has already are not rolled out again."""
        requests = self._requests(tasks, mode, samples, self._step if step is None else step, part)
        return await self._roll_out(requests, progress)

    async def rollout_greedily(self, tasks: list[Any], step: int, part: int) -> list[FinishedRollout]:
        """Have every task rolled out once for training, by a model that says to take the most probable tokens."""
        requests = self._requests(
            tasks,
            "train",
            1,
            step,
            part,
            kind="greedy-",
            resources_id=self._greedy_id,
            metadata={GREEDY: True},
        )
        return await self._roll_out(requests, lambda done, total: None)

    async def _add_greedy_model(self) -> str:
        """Add resources that are not the latest."""
        latest = await self.store.get_latest_resources()
        assert latest is not None, "the engines' address is there"
        added = await self.store.add_resources(with_greedy(latest.resources))
        await self.store.update_resources(latest.resources_id, latest.resources)
        return added.resources_id

    def _requests(
        self,
        tasks: list[Any],
        mode: RolloutMode,
        samples: int,
        step: int,
        part: int,
        kind: str = "",
        **more: Any,
    ) -> list[EnqueueRolloutRequest]:
        """One for each rollout, named by its place.

        Args:
            kind: tells the names of these from others of the same place.
        """
        return [
            EnqueueRolloutRequest(
                input=task,
                mode=mode,
                config=self.plan.rollout,
                group_id=f"{mode}-{step}-{part}-{index}",
                rollout_id=f"{self.start.lineage}-{mode}-{step}-{part}-{index}-{kind}{sample}",
                **more,
            )
            for index, task in enumerate(tasks)
            for sample in range(samples)
        ]

    async def _roll_out(
        self, requests: list[EnqueueRolloutRequest], progress: Callable[[int, int], None]
    ) -> list[FinishedRollout]:
        async with self._catching_up:
            await self._catch_up(requests)
        return await self._collect(await self._finish(requests, progress))

    async def _catch_up(self, requests: list[EnqueueRolloutRequest]) -> None:
        """Before something is sampled, the engines get the weights. What was taken back is queued again."""
        ids = [request.rollout_id for request in requests if request.rollout_id]
        if self.replaying and not await self._all_decided(ids):
            self.replaying = False
            if self.version > self._published:
                await self.publish_weights(self.plan.algorithm.sync_timeout_s)
        for request in requests:
            if request.rollout_id in self._taken_back:
                resources_id = request.resources_id or await self._latest_resources_id()
                await self.store.update_rollout(
                    request.rollout_id, status="requeuing", resources_id=resources_id
                )
                self._taken_back.discard(request.rollout_id)

    async def _all_decided(self, ids: list[str]) -> bool:
        found = await self.store.query_rollouts(rollout_id_in=ids)
        return len(found) == len(ids) and all(rollout.status in ("succeeded", "failed") for rollout in found)

    async def _latest_resources_id(self) -> str:
        latest = await self.store.get_latest_resources()
        assert latest is not None, "the engines' address is there"
        return latest.resources_id

    async def _collect(self, ids: list[str]) -> list[FinishedRollout]:
        """What the rollouts left; with spans only where these tell which agent called."""
        finished = await self.store.collect(ids)
        chosen = [
            item.rollout.rollout_id
            for item in finished
            if self.plan.trained_agents is not None
            or self.plan.algorithm.turn_rewards
            or item.rollout.metadata.get(TRAINABLE_AGENTS)
        ]
        if not chosen:
            return finished
        with_spans = {
            item.rollout.rollout_id: item for item in await self.store.collect(chosen, with_spans=True)
        }
        return [with_spans.get(item.rollout.rollout_id, item) for item in finished]

    async def recover(self, fault: LearnerLostError) -> ResumePoint:
        """Start lost learners anew, from the last training state; returns where that is. The engines go on meanwhile.

        Raises:
            LearnerError: they were lost more often than `max_restarts` allows.
        """
        limit = self.plan.learner.max_restarts
        if self.restarts >= limit:
            raise LearnerError(
                f"the learners were lost more often than max_restarts={limit} allows; the last time: {fault}"
            ) from fault
        self.restarts += 1
        self._say("the learners start anew")
        await self.learners.restart()
        states = TrainingStates(self.plan.state_url)
        steps = await asyncio.to_thread(states.steps)
        if not steps:
            raise LearnerError(
                f"the learners were lost before a first training state was in {states.url}: {fault}"
            ) from fault
        place = place_of(states, steps[-1])
        await self.learners.load_state(states.url, place.step, place.version)
        self.version, self.replaying = place.version, True
        return place

    def caught_up(self) -> None:
        """The learners are where they were lost. A run that was resumed may not have published their weights by then; they still
        are, before anything is sampled."""
        self.replaying = self.version > self._published

    async def counts(self) -> dict[str, int]:
        return {**await super().counts(), "learner_restarts": self.restarts}

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """One update of the learners, while the engines sleep if they share a device with them."""
        metrics = await self._update(batch)
        self.version += 1
        return metrics

    async def _update(self, batch: TrainBatch) -> dict[str, float]:
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
        if (
            version > self._published
        ):  # else the engines have it, and learners that were lost have come to it again
            await self.fleet.publish(version, box, timeout, self.plan.engine.update_mode)
            self._published = version
        return version, await self._compare(version, SYNC_TOKENS, timeout)

    async def _compare(self, version: int, tokens: int, timeout: float) -> Parity:
        """Compare the log-probs of all engines and the learners on a probe."""
        ids = probe_ids(self._vocabulary, tokens, self.plan.seed)
        async with task_group() as tasks:
            engines = tasks.create_task(self.fleet.probe(ids, timeout))
            learner = tasks.create_task(self.learners.logprobs(ids))
        return self._parity.check(version, engines.result(), learner.result())
