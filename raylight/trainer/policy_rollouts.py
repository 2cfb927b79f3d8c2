"""The rollouts of a run that trains a policy.

The name of a rollout contains its step, so that a replayed step finds its rollouts in the store.
"""

from __future__ import annotations

import asyncio
from typing import Any

from raylight.errors import LearnerLostError
from raylight.trainer.repeated_rollouts import RepeatedRollouts
from raylight.trainer.resume import ResumePoint
from raylight.trainer.rollouts import Progress, run_rollouts
from raylight.trainer.run import Run
from raylight.trainer.run_resources import with_sampling
from raylight.types import (
    GREEDY,
    TRAINABLE_AGENTS,
    EnqueueRolloutRequest,
    FinishedRollout,
    RolloutMode,
)


class PolicyRollouts:
    """Names, enqueues and collects the rollouts of a run that trains.

    Args:
        repeated: the rollouts of a resumed run that run again.
    """

    def __init__(self, run: Run, repeated: RepeatedRollouts) -> None:
        self.run, self.start = run, run.start
        self.replaying = not run.start.is_fresh
        """True while steps are replayed from the store: engines need no weights until something is
        sampled."""
        self._step = run.start.step
        self._replay_lock = asyncio.Lock()
        self._repeated = repeated
        self._greedy_id: str | None = None
        """Id of the resources whose model samples greedily."""
        self._val_id: str | None = None
        """Id of the resources of validation rollouts; None: the latest."""

    async def add_resources(self) -> None:
        """Add the resources of rollouts that sample otherwise than those of training."""
        algorithm = self.run.training.algorithm
        if algorithm.needs_greedy_rollouts:
            self._greedy_id = await self._add_resources({"temperature": 0.0})
        if algorithm.val_sampling_parameters is not None:
            self._val_id = await self._add_resources(algorithm.val_sampling_parameters)

    async def _add_resources(self, sampling: dict[str, Any]) -> str:
        """Add resources whose model has these sampling parameters, without making them the latest; return
        their id."""
        store = self.run.store
        latest = await store.get_latest_resources()
        assert latest is not None, "the resources were published"
        added = await store.add_resources(with_sampling(latest.resources, sampling))
        await store.update_resources(latest.resources_id, latest.resources)
        return added.resources_id

    def set_step(self, step: int) -> None:
        """Set the step that `rollout` uses where none is given."""
        self._step = step

    async def rollout(
        self,
        tasks: list[Any],
        mode: RolloutMode,
        samples: int,
        progress: Progress,
        step: int | None = None,
        part: int = 0,
    ) -> list[FinishedRollout]:
        """Roll every task out `samples` times as one group and wait until all are decided.

        Rollouts of this step and part that the store already has are not repeated.
        """
        step = self._step if step is None else step
        resources: dict[str, Any] = {"resources_id": self._val_id} if mode == "val" else {}
        return await self._roll_out(self._requests(tasks, mode, samples, step, part, **resources), progress)

    async def rollout_greedily(self, tasks: list[Any], step: int, part: int) -> list[FinishedRollout]:
        """Roll every task out once for training, with a model whose sampling parameters ask for temperature
        0."""
        greedy: dict[str, Any] = {
            "kind": "greedy-",
            "resources_id": self._greedy_id,
            "metadata": {GREEDY: True},
        }
        return await self._roll_out(self._requests(tasks, "train", 1, step, part, **greedy), lambda *_: None)

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
                config=self.run.settings.rollout,
                group_id=f"{mode}-{step}-{part}-{index}",
                rollout_id=f"{self.start.lineage}-{mode}-{step}-{part}-{index}-{kind}{sample}",
                **fields,
            )
            for index, task in enumerate(tasks)
            for sample in range(samples)
        ]

    async def _roll_out(
        self, requests: list[EnqueueRolloutRequest], progress: Progress
    ) -> list[FinishedRollout]:
        async with self._replay_lock:
            await self._prepare_to_sample(requests)
        # rollouts may wait themselves for a replica that the learners cannot serve
        failure = self.run.learners.wait_for_failure
        return await self._collect(await run_rollouts(self.run, requests, progress, failure))

    async def _prepare_to_sample(self, requests: list[EnqueueRolloutRequest]) -> None:
        """If anything will be sampled, end the replay and publish the weights. Requeue rollouts that run
        again."""
        ids = [request.rollout_id for request in requests if request.rollout_id]
        learners = self.run.learners
        if self.replaying and not await self._all_decided(ids):
            self.replaying = False
            if learners.version > learners.published:
                await learners.publish()
        await self._repeated.requeue(self.run.store, requests)

    async def _all_decided(self, ids: list[str]) -> bool:
        if self._repeated.includes_any(ids):
            return False
        stored = await self.run.store.get_rollout_states(ids)
        return len(stored) == len(ids) and all(
            rollout.status in ("succeeded", "failed") for rollout in stored
        )

    async def _collect(self, ids: list[str]) -> list[FinishedRollout]:
        """Return finished rollouts, with spans only where these are needed to assign calls to agents or
        rewards to turns."""
        store, training = self.run.store, self.run.training
        if training.trained_agents is not None or training.algorithm.turn_rewards:
            return await store.collect(ids, with_spans=True, with_span_tokens=False)
        finished = await store.collect(ids)
        chosen = [item.rollout.rollout_id for item in finished if item.rollout.metadata.get(TRAINABLE_AGENTS)]
        if not chosen:
            return finished
        with_spans = await store.collect(chosen, with_spans=True, with_span_tokens=False)
        by_id = {item.rollout.rollout_id: item for item in with_spans}
        return [by_id.get(item.rollout.rollout_id, item) for item in finished]

    async def recover(self, fault: LearnerLostError) -> ResumePoint:
        """Restart lost learners from the last training state; return its position.

        Raises:
            LearnerError: the learners were lost more often than `max_restarts` allows.
        """
        # of rollouts that waited side by side, the first to fail cancels the others
        await self._repeated.find_cancelled(self.run.store)
        point = await self.run.learners.recover(fault)
        self.replaying = True
        return point

    def end_replay(self) -> None:
        """Continue after restarted learners have reached the step at which they were lost.

        If their weights were never published, which happens in a resumed run, the replay continues until
        something is sampled.
        """
        learners = self.run.learners
        self.replaying = learners.version > learners.published
        learners.notice_version()
