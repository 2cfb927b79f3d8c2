"""The components of a run that trains a policy: store, runners, learners and the serving deployment.

The name of a rollout contains its step, so that a replayed step finds its rollouts in the store.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ray.util.placement_group import remove_placement_group

from raylight.agent.resources import LLM
from raylight.aio import cancel_all, task_group
from raylight.config import StoreConfig
from raylight.errors import LearnerError, LearnerLostError
from raylight.experience.batch import TrainBatch
from raylight.experience.checkpoints import TrainingStates
from raylight.learner.group import LearnerGroup, bundles
from raylight.trainer import served_adapter
from raylight.trainer.cluster import reserve
from raylight.trainer.parity import Parity, ParityMonitor, make_probe
from raylight.trainer.plan import MODEL_NAME, PolicyPlan, with_sampling
from raylight.trainer.publication import Publications
from raylight.trainer.repeated_rollouts import RepeatedRollouts
from raylight.trainer.resume import ResumePoint, resume_point_of, wait_for_store
from raylight.trainer.served_session import ServedSession
from raylight.types import (
    GREEDY,
    TRAINABLE_AGENTS,
    EnqueueRolloutRequest,
    FinishedRollout,
    RolloutMode,
)
from raylight.weight_sync.seeds import derive_seed


class PolicySession(ServedSession):
    """A ServedSession with learners.

    Args:
        start: the position at which the run starts.
    """

    plan: PolicyPlan
    _publications: Publications

    def __init__(
        self, plan: PolicyPlan, show_stage: Callable[[str], None], owns_cluster: bool, start: ResumePoint
    ) -> None:
        super().__init__(plan, show_stage, owns_cluster)
        self.start = start
        self._reopens_store = start.same_run
        self.replaying = not start.is_fresh
        """True while steps are replayed from the store: engines need no weights until something is
        sampled."""
        self.restarts = 0
        """Number of times that lost learners were restarted."""
        self.version = start.version
        """Version of the learners' weights."""
        self._step = start.step
        self._replay_lock = asyncio.Lock()
        self._repeated = RepeatedRollouts(start, show_stage)
        self._probe = make_probe(plan.model_path, plan.engine.max_model_len, plan.seed)
        self._parity = ParityMonitor(plan.algorithm.max_logprob_mismatch)
        self._reported_no_sleep = False
        self._greedy_id: str | None = None
        """Id of the resources whose model samples greedily."""
        self._val_id: str | None = None
        """Id of the resources of validation rollouts; None: the latest."""

    async def _start(self) -> None:
        plan = self.plan
        placement = await self._reserve()
        if self._reopens_store and isinstance(plan.store, StoreConfig):
            await wait_for_store(Path(plan.store_path))
        self._start_store()
        if self._reopens_store:
            await self._repeated.find(self.store)
        await self._start_coordinator()
        self.learners = LearnerGroup(plan.name, plan.learner, placement)
        self._stack.callback(self.learners.stop)
        timeout = plan.algorithm.sync_timeout_s
        self._publications = Publications(self.learners, self._coordinator, plan.engine, timeout)
        serving_joined = asyncio.create_task(self._publications.serve_joined(lambda: self.version))
        self._stack.push_async_callback(cancel_all, [serving_joined])
        deployment = self._make_deployment(await self._sampling_seed(), plan.algorithm.training_temperature)
        pool = self._make_pool()
        self._show_stage("starting the engine, the learners and the runners")
        settings = plan.algorithm.policy_settings()
        async with task_group() as tasks:
            learners = tasks.create_task(
                self.learners.setup(plan.model_path, settings, plan.total_steps, plan.seed)
            )
            tasks.create_task(pool.start())
            if plan.shares_gpus:  # vLLM sizes its cache by the memory that is free when it starts
                await asyncio.wait([learners])
            serving = tasks.create_task(deployment.start())
        if plan.checkpoint.path:  # the models in output_dir can be exported from a state
            await self.learners.check_storage({"checkpoint.path": plan.state_url})
        else:
            await self.learners.check_storage({"output_dir": plan.output_dir})
        # an engine may compile at its first request, which belongs to its start
        patience = max(plan.algorithm.sync_timeout_s, plan.engine.start_timeout_s)
        if plan.serves_adapter:
            await served_adapter.publish_initial(self.learners, self.replicas, patience)
        await self._check_parity(0, patience)
        sampling = plan.algorithm.sampling_parameters
        llm = LLM(endpoint=serving.result(), model=MODEL_NAME, traced=True, sampling_parameters=sampling)
        await self._publish_resources(llm)
        if plan.algorithm.needs_greedy_rollouts:
            self._greedy_id = await self._add_resources({"temperature": 0.0})
        if plan.algorithm.val_sampling_parameters is not None:
            self._val_id = await self._add_resources(plan.algorithm.val_sampling_parameters)
        if not self.start.is_fresh:
            await self.learners.load_state(self.start.state_url, self.start.step, self.version)

    async def _sampling_seed(self) -> int:
        """Return the engines' seed. A resumed run must not repeat responses of groups that it completes.

        A store that was lost has no attempts; the step then tells the resumed run from the first one.
        """
        if self.start.is_fresh and not self._reopens_store:
            return self.plan.seed
        attempts = (await self.store.statistics())["total_attempts"]
        return derive_seed(self.plan.seed, "resumed", self.start.step, attempts)

    async def _reserve(self) -> Any:
        """Reserve the learners' resources as a placement group."""
        config = self.plan.learner
        placement = await reserve(
            f"{self.plan.name}-learners", bundles(config), config.strategy, config.placement_timeout_s
        )
        self._stack.callback(remove_placement_group, placement)
        return placement

    def set_step(self, step: int) -> None:
        """Set the step that `rollout` uses where none is given."""
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
        """Roll every task out `samples` times as one group and wait until all are decided.

        Rollouts of this step and part that the store already has are not repeated.
        """
        step = self._step if step is None else step
        resources: dict[str, Any] = {"resources_id": self._val_id} if mode == "val" else {}
        requests = self._requests(tasks, mode, samples, step, part, **resources)
        return await self._roll_out(requests, progress)

    async def rollout_greedily(self, tasks: list[Any], step: int, part: int) -> list[FinishedRollout]:
        """Roll every task out once for training, with a model whose sampling parameters ask for temperature
        0."""
        greedy: dict[str, Any] = {
            "kind": "greedy-",
            "resources_id": self._greedy_id,
            "metadata": {GREEDY: True},
        }
        return await self._roll_out(self._requests(tasks, "train", 1, step, part, **greedy), lambda *_: None)

    async def _add_resources(self, sampling: dict[str, Any]) -> str:
        """Add resources whose model has these sampling parameters, without making them the latest; return
        their id."""
        latest = await self.store.get_latest_resources()
        assert latest is not None, "the resources were published"
        added = await self.store.add_resources(with_sampling(latest.resources, sampling))
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
        **fields: Any,
    ) -> list[EnqueueRolloutRequest]:
        """Return a request for each rollout, named by lineage, mode, step, part, task and sample.

        Args:
            kind: part of the name, for rollouts that otherwise have the names of others.
            fields: further fields of the requests.
        """
        return [
            EnqueueRolloutRequest(
                input=task,
                mode=mode,
                config=self.plan.rollout,
                group_id=f"{mode}-{step}-{part}-{index}",
                rollout_id=f"{self.start.lineage}-{mode}-{step}-{part}-{index}-{kind}{sample}",
                **fields,
            )
            for index, task in enumerate(tasks)
            for sample in range(samples)
        ]

    async def _roll_out(
        self, requests: list[EnqueueRolloutRequest], progress: Callable[[int, int], None]
    ) -> list[FinishedRollout]:
        async with self._replay_lock:
            await self._prepare_to_sample(requests)
        return await self._collect(await self._run_requests(requests, progress))

    async def _wait_for_rollouts(self, ids: list[str], progress: Callable[[int, int], None]) -> None:
        """Wait for rollouts, unless they may wait themselves for a replica that the learners cannot serve.

        Raises:
            LearnerError: the learners have failed. The rollouts go on meanwhile.
        """
        tasks = [
            asyncio.create_task(super()._wait_for_rollouts(ids, progress)),
            asyncio.create_task(self._publications.wait_for_failure()),
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            done.pop().result()
        finally:
            await cancel_all(tasks)

    async def _prepare_to_sample(self, requests: list[EnqueueRolloutRequest]) -> None:
        """If anything will be sampled, end the replay and publish the weights. Requeue rollouts that run
        again."""
        ids = [request.rollout_id for request in requests if request.rollout_id]
        if self.replaying and not await self._all_decided(ids):
            self.replaying = False
            if self.version > self._publications.published:
                await self.publish_weights(self.plan.algorithm.sync_timeout_s)
        await self._repeated.requeue(self.store, requests)

    async def _all_decided(self, ids: list[str]) -> bool:
        if self._repeated.includes_any(ids):
            return False
        stored = await self.store.get_rollout_states(ids)
        return len(stored) == len(ids) and all(
            rollout.status in ("succeeded", "failed") for rollout in stored
        )

    async def _collect(self, ids: list[str]) -> list[FinishedRollout]:
        """Return finished rollouts, with spans only where these are needed to assign calls to agents or
        rewards to turns."""
        if self.plan.trained_agents is not None or self.plan.algorithm.turn_rewards:
            return await self.store.collect(ids, with_spans=True, with_span_tokens=False)
        finished = await self.store.collect(ids)
        chosen = [item.rollout.rollout_id for item in finished if item.rollout.metadata.get(TRAINABLE_AGENTS)]
        if not chosen:
            return finished
        with_spans = await self.store.collect(chosen, with_spans=True, with_span_tokens=False)
        by_id = {item.rollout.rollout_id: item for item in with_spans}
        return [by_id.get(item.rollout.rollout_id, item) for item in finished]

    async def recover(self, fault: LearnerLostError) -> ResumePoint:
        """Restart lost learners and load the last training state; return its position. The engines keep
        running.

        Raises:
            LearnerError: the learners were lost more often than `max_restarts` allows.
        """
        limit = self.plan.learner.max_restarts
        if self.restarts >= limit:
            raise LearnerError(
                f"the learners were lost more often than learner.max_restarts={limit} allows; the last time: "
                f"{fault}"
            ) from fault
        self.restarts += 1
        self._show_stage("restarting the learners")
        # of rollouts that waited side by side, the first to fail cancels the others
        await self._repeated.find_cancelled(self.store)
        async with self._publications.learners_busy:
            await self.learners.restart()
            states = TrainingStates(self.plan.state_url)
            steps = await asyncio.to_thread(states.steps)
            if not steps:
                raise LearnerError(
                    f"the learners were lost before {states.url} had a training state: {fault}"
                ) from fault
            point = resume_point_of(states, steps[-1])
            await self.learners.load_state(states.url, point.step, point.version)
            self.version, self.replaying = point.version, True
        self._publications.notice_version()
        return point

    def end_replay(self) -> None:
        """Continue after restarted learners have reached the step at which they were lost.

        If their weights were never published, which happens in a resumed run, the replay continues until
        something is sampled.
        """
        self.replaying = self.version > self._publications.published
        self._publications.notice_version()

    async def counts(self) -> dict[str, int]:
        return {**await super().counts(), "learner_restarts": self.restarts}

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        """Update the learners' weights; return metrics. Engines that share a device with the learners sleep
        meanwhile."""
        config, timeout = self.plan.engine, self.plan.algorithm.sync_timeout_s
        async with self._publications.learners_busy:
            if not config.sleep_while_learning:
                metrics = await self.learners.update(batch)
            else:
                try:
                    self._report_no_sleep(await self.replicas.sleep(timeout))
                    metrics = await self.learners.update(batch)
                finally:
                    await self.replicas.wake(timeout)
            self.version += 1
        return metrics

    def _report_no_sleep(self, reasons: dict[str, Any]) -> None:
        """Show once which replicas cannot sleep, and why."""
        awake = {replica: reason for replica, reason in reasons.items() if reason}
        if awake and not self._reported_no_sleep:
            for replica, reason in awake.items():
                self._show_stage(f"replica {replica} cannot sleep: {reason}")
            self._reported_no_sleep = True

    async def publish_weights(self, timeout: float) -> tuple[int, Parity]:
        """Send the learners' weights to all replicas; return their version and how well engines and learners
        agree.

        Agents sample from this version from then on.

        Raises:
            WeightSyncError: the weights did not reach enough replicas within `sync_timeout_s`.
            MismatchError: a replica's log-probs differ from the learners'.
        """
        adapter = MODEL_NAME if self.plan.serves_adapter else None
        async with self._publications.learners_busy:
            version = self.version
            if version > self._publications.published:  # restarted learners may return to a published one
                await self._publications.publish(version, adapter)
        return version, await self._check_parity(version, timeout)

    async def _check_parity(self, version: int, timeout: float) -> Parity:
        """Compare the log-probs of all replicas and the learners on a probe prompt."""
        async with task_group() as tasks:
            adapter = MODEL_NAME if self.plan.serves_adapter else None
            replicas = tasks.create_task(self.replicas.probe(self._probe, timeout, adapter))
            learner = tasks.create_task(self.learners.logprobs(self._probe))
        return self._parity.check(version, replicas.result(), learner.result())
