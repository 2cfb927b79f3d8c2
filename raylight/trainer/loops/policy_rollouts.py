"""Rollouts of a run that trains a policy. They have names, so that the run finds them in the store again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from raylight._utils.aio import BroadcastCondition
from raylight.config import MODEL_NAME
from raylight.errors import StoreError
from raylight.experience.opponents import OPPONENT
from raylight.tasks.task_set import Draw, ShuffledTasks
from raylight.trainer.components.opponents import ServedOpponents
from raylight.trainer.components.run_components import PolicyComponents
from raylight.trainer.components.store import cancel_undecided
from raylight.trainer.loops.awaited_rollouts import CANCEL_TIMEOUT_S, Progress, wait_for_sound
from raylight.trainer.loops.group_grader import GroupGrader
from raylight.trainer.ray_session.cluster_monitor import is_cluster_lost
from raylight.trainer.spec.inputs import SourcedTasks
from raylight.trainer.spec.run_resources import with_sampling
from raylight.types import (
    DRAW,
    GREEDY,
    SOURCE,
    TRAINABLE_AGENTS,
    EnqueueRolloutRequest,
    FinishedRollout,
    JsonObject,
    ResourcesUpdate,
    Rollout,
)

HELD_OUT = "held_out"
"""Metadata key of a validation rollout: number and digest of the validation tasks."""
logger = logging.getLogger(__name__)


class PolicyRollouts:
    """Requests the rollouts of a run, waits for them and reads them.

    A rollout that the store has already is not repeated, unless it was cancelled or the infrastructure
    failed it.

    Args:
        note: shows a message to the user.
    """

    def __init__(self, run: PolicyComponents, note: Callable[[str], None] = logger.warning) -> None:
        self._run, self._store, self._start = run, run.store, run.start
        self._grader = GroupGrader.of(run, note)
        self._algorithm, self._trained_agents = run.training.algorithm, run.training.trained_agents
        names = self._algorithm.served_models or (MODEL_NAME,)
        self._served = {name: name for name in names}
        """Name under which each model is served."""
        self.opponents: ServedOpponents | None = None
        """Opponents of the policy, with self-play."""
        self._against: dict[str, str] = {}
        """Id of the resources of training rollouts against an opponent, by the name under which it is
        served."""
        self._resources: ResourcesUpdate
        """Resources of training rollouts."""
        self._greedy_id: str | None = None
        """Id of the resources whose model samples greedily."""
        self._val_id: str | None = None
        """Id of the resources of validation rollouts; None: the same as for training."""
        self.in_evaluation = 0
        """Number of validation rollouts that are queued and not decided."""
        self.room_changed = BroadcastCondition()
        """Notified when more or fewer rollouts may be in progress, and when some are decided."""
        self.limit: int | None = None
        """Number of rollouts that may be in progress; None: as many as the runners execute."""

    async def add_resources(self) -> None:
        """Add the resources of rollouts that sample otherwise than in training."""
        self._resources = self._run.endpoints.published
        if self._algorithm.needs_greedy_rollouts:
            self._greedy_id = await self._add_resources({"temperature": 0.0})
        if self._algorithm.val_sampling_parameters is not None:
            self._val_id = await self._add_resources(self._algorithm.val_sampling_parameters)

    async def _add_resources(
        self, sampling: JsonObject, names: Mapping[str, str] = MappingProxyType({})
    ) -> str:
        """Add resources whose models have these sampling parameters, without leaving them the latest; return
        their id.

        Args:
            names: other names under which the engines serve models.
        """
        own = self._resources
        served = self._served | dict(names)
        added = await self._store.add_resources(with_sampling(own.resources, sampling, served))
        await self._store.update_resources(own.resources_id, own.resources)
        return added.resources_id

    async def offer_opponents(self, names: Iterable[str]) -> None:
        """Add the resources of training rollouts against each opponent, which is served under its name."""
        for name in names:
            if name not in self._against:
                self._against[name] = await self._add_resources({}, {OPPONENT: name})

    def group_ids(self, group: int) -> list[str]:
        prefix = f"{self._start.lineage}-train-{group}"
        ids = [f"{prefix}-{sample}" for sample in range(self._algorithm.group_size)]
        return [*ids, f"{prefix}-greedy"] if self._algorithm.needs_greedy_rollouts else ids

    def group_requests(self, group: int, draw: Draw) -> list[EnqueueRolloutRequest]:
        """Return the requests of a training group, for `enqueue`."""
        ids = self.group_ids(group)
        metadata: JsonObject = {} if draw.source is None else {SOURCE: draw.source}
        metadata |= {DRAW: draw.place} if draw.place else {}
        resources_id = self._resources.resources_id
        if self.opponents is not None:
            step = self.opponents.pool.draw(group)
            metadata |= {OPPONENT: step}
            resources_id = self._against[self.opponents.names[step]]
        own: JsonObject = {"resources_id": resources_id, "metadata": metadata}
        greedy: JsonObject = {"resources_id": self._greedy_id, "metadata": metadata | {GREEDY: True}}
        return [
            EnqueueRolloutRequest(
                input=draw.task,
                mode="train",
                config=self._algorithm.rollout,
                group_id=f"train-{group}",
                rollout_id=rollout_id,
                **(greedy if sample == self._algorithm.group_size else own),
            )
            for sample, rollout_id in enumerate(ids)
        ]

    async def stored_draws(self, groups: Iterable[int]) -> dict[int, JsonObject]:
        """Return the draws of the groups whose rollouts the store has, by group."""
        firsts = {self.group_ids(group)[0]: group for group in groups}
        stored = await self._store.query_rollouts(rollout_id_in=list(firsts))
        return {
            firsts[rollout.rollout_id]: rollout.metadata[DRAW]
            for rollout in stored
            if DRAW in rollout.metadata
        }

    async def evaluate(
        self,
        step: int,
        tasks: list[object],
        samples: int,
        progress: Progress,
        names: Mapping[str, str] | None = None,
    ) -> list[FinishedRollout]:
        """Roll every validation task out `samples` times after a step, and wait until all are decided.

        What the infrastructure failed in an evaluation that was completed before a resume stays failed.

        Args:
            names: names of a pinned version of models, which the rollouts sample from; None for the current
                one.
        """
        resources_id = self._val_id or self._resources.resources_id
        if self.opponents is not None:
            names = {OPPONENT: self.opponents.initial}
        if names is not None:
            resources_id = await self._add_resources(self._algorithm.val_sampling_parameters or {}, names)
        held_out, prefix = ShuffledTasks(tasks).fingerprint(), f"{self._start.lineage}-val-{step}"
        first = 0
        while stored := await self._store.query_rollouts(rollout_id_in=[f"{prefix}-{first}-0"]):
            former = stored[0].metadata.get(HELD_OUT, held_out)
            if former == held_out:
                break
            first += former["number"]  # before a resume, the run had other validation tasks
        requests = [
            EnqueueRolloutRequest(
                input=task,
                mode="val",
                config=self._algorithm.rollout,
                group_id=f"val-{step}-{number}",
                rollout_id=f"{prefix}-{number}-{sample}",
                resources_id=resources_id,
                metadata=_source_of(tasks, number - first) | {HELD_OUT: held_out},
            )
            for number, task in enumerate(tasks, first)
            for sample in range(samples)
        ]
        ids = [request.rollout_id for request in requests if request.rollout_id]

        def show(done: int, total: int) -> None:
            self._note_evaluation(total - done)
            progress(done, total)

        repeats_lost = step not in self._start.evaluated_steps
        try:
            if names is None or self.opponents is not None:
                await self.enqueue(requests, repeats_lost)
            else:
                await self._enqueue_share(requests, repeats_lost, ids)
            self._note_evaluation(len(ids))
            await wait_for_sound(self._run, ids, show)
        finally:
            self._note_evaluation(0)
        return await self.grade(await self.collect(ids))

    async def _enqueue_share(
        self, requests: list[EnqueueRolloutRequest], repeats_lost: bool, ids: list[str]
    ) -> None:
        """Queue rollouts as earlier ones end, so that half of those in progress stay free for training."""
        queued = done = 0
        while queued < len(requests):
            share = max((self.limit or self._run.runners.most_rollouts()) // 2, 1)
            end = max(min(done + share, len(requests)), queued)
            await self.enqueue(requests[queued:end], repeats_lost)
            queued = end
            self._note_evaluation(queued - done)
            at_least = min(done + max(share // 4, 1), queued)
            decided = self._store.wait_until_decided(rollout_ids=ids[:queued], at_least=at_least)
            done = len(await decided)

    def _note_evaluation(self, rollouts: int) -> None:
        self.in_evaluation = rollouts
        self.room_changed.notify_all()

    async def enqueue(self, requests: list[EnqueueRolloutRequest], repeats_lost: bool = True) -> None:
        """Queue rollouts; those that the store has and that were cancelled run again.

        Args:
            repeats_lost: those that the infrastructure failed run again too.
        """
        stored = await self._store.enqueue_many_rollouts(requests)
        await asyncio.gather(  # in one message
            *(
                self._store.update_rollout(
                    rollout.rollout_id, status="requeuing", resources_id=request.resources_id
                )
                for request, rollout in zip(requests, stored, strict=True)
                if rollout.status == "cancelled" or (repeats_lost and _is_lost(rollout))
            )
        )

    async def collect(self, ids: list[str]) -> list[FinishedRollout]:
        """Return finished rollouts, with spans only where these are needed to assign calls to agents or
        rewards to turns or agents, or to change messages."""
        if self._trained_agents is not None or self._algorithm.needs_spans:
            return await self.with_spans(ids)
        finished = await self._store.collect(ids)
        chosen = [item.rollout.rollout_id for item in finished if item.rollout.metadata.get(TRAINABLE_AGENTS)]
        if not chosen:
            return finished
        by_id = {item.rollout.rollout_id: item for item in await self.with_spans(chosen)}
        return [by_id.get(item.rollout.rollout_id, item) for item in finished]

    async def grade(self, finished: list[FinishedRollout]) -> list[FinishedRollout]:
        """Return decided rollouts of whole groups with the rewards of the group reward, if there is one."""
        return finished if self._grader is None else await self._grader.grade_all(finished)

    async def with_spans(self, ids: list[str]) -> list[FinishedRollout]:
        """Return finished rollouts with their spans, which lack the tokens of calls."""
        return await self._store.collect(ids, with_spans=True, with_span_tokens=False)


async def cancel_left(run: PolicyComponents) -> None:
    """Cancel what is undecided at the end of a run's work, so that no runner goes on with it."""
    if not is_cluster_lost():
        with contextlib.suppress(TimeoutError, StoreError):
            await asyncio.wait_for(cancel_undecided(run.store, run.start), CANCEL_TIMEOUT_S)


def _source_of(tasks: list[object], index: int) -> JsonObject:
    source = tasks.sources[index] if isinstance(tasks, SourcedTasks) else None
    return {} if source is None else {SOURCE: source}


def _is_lost(rollout: Rollout) -> bool:
    """Return True if the infrastructure failed a rollout."""
    failure = rollout.failure
    return rollout.status == "failed" and failure is not None and failure.kind == "infrastructure"
