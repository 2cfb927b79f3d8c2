"""The groups of training rollouts of a run: dispatched as the pacer allows, and taken by the training steps.

Groups are numbered from 0 over the whole run. Group g has the g-th task that is drawn.

Laws:
- The groups of a step are recorded in the store before the step trains on them, and a recorded step takes the
  same groups whenever it is taken again. Each group is taken by one step.
- Nothing is in memory that the store lacks: what was finished before a run was killed is not sampled again,
  and what was not is.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

from raylight._utils.aio import BroadcastCondition, cancel_all, task_group
from raylight.experience.batches.batch import BatchRules
from raylight.tasks.task_set import Draw, TaskSet
from raylight.trainer.components.run_components import PolicyComponents
from raylight.trainer.loops.awaited_rollouts import Progress, end_unresponsive, wait_for_rollouts
from raylight.trainer.loops.pacer import Pacer
from raylight.trainer.loops.policy_rollouts import PolicyRollouts, cancel_left
from raylight.trainer.output.report import Metrics
from raylight.types import FinishedRollout, JsonObject, StepGroups, TokenTotals


def choose_groups(
    finished: Iterable[int], is_informative: Callable[[int], bool], per_step: int, most: int
) -> list[int] | None:
    """Return the groups of the next step, or None if more must finish first.

    A step ends with the group that makes `per_step` informative ones, or with the `most`-th group (dynamic
    sampling, https://arxiv.org/abs/2503.14476).

    Args:
        finished: finished groups, in the order in which steps take them.
    """
    chosen: list[int] = []
    informative = 0
    for group in finished:
        chosen.append(group)
        informative += is_informative(group)
        if len(chosen) == most or informative == per_step:
            return chosen
    return None


class TakenGroups:
    """Numbers of the groups that steps took: all below `next` except the open ones."""

    def __init__(self, next_group: int = 0, open_groups: Iterable[int] = ()) -> None:
        self.next, self.open = next_group, set(open_groups)

    def add(self, step: StepGroups) -> None:
        groups = set(step.all)
        end = max(self.next, *(group + 1 for group in groups))
        self.open = (self.open | set(range(self.next, end))) - groups
        self.next = end

    def rest(self, start: int = 0) -> Iterator[int]:
        """Yield the groups >= `start` that no step took, forever."""
        yield from sorted(group for group in self.open if group >= start)
        yield from itertools.count(max(self.next, start))

    def __len__(self) -> int:
        return self.next - len(self.open)

    def to_json(self) -> JsonObject:
        """Return the arguments of an equal object."""
        return {"next_group": self.next, "open_groups": sorted(self.open)}


@dataclass(frozen=True)
class FinishedGroup:
    """A group whose rollouts are all decided."""

    rollouts: list[FinishedRollout]
    is_informative: bool
    """True if its rewards are not all equal, so that it needs no replacement."""
    oldest_version: int | None
    """Result of `_oldest_version`."""


class TrainingGroups:
    """Dispatches groups, and hands them to the training steps.

    Args:
        check: raises an error if the rollouts of a step cannot be trained on; called before the step is
            recorded.
        progress: receives the number of decided rollouts of the groups that no step took and that are not
            dropped, and the number of all their rollouts.
    """

    def __init__(
        self,
        run: PolicyComponents,
        rollouts: PolicyRollouts,
        tasks: TaskSet,
        check: Callable[[list[FinishedRollout]], None],
        progress: Progress,
    ) -> None:
        self._run, self._rollouts = run, rollouts
        self._check, self._progress = check, progress
        algorithm = self._algorithm = run.training.algorithm
        self._sampler = tasks.sampler(run.settings.seed)
        self._sampling = asyncio.Lock()
        """Held while the sampler is used, which may be in a thread."""
        start = run.start
        self.observed_step = start.step if start.starts_new_lineage else start.observed_step
        """Last step whose outcomes the sampler has received."""
        self._pacer = Pacer(algorithm.tasks_per_step, algorithm.max_staleness, run.training.total_steps)
        self._taken = TakenGroups()
        self._logged, self._logged_step = TakenGroups(), 0
        """Groups that were taken up to the last step that is logged, or about to be."""
        self._records: dict[int, StepGroups] = {}
        """Groups of the steps that were taken and are not logged, and of those that are taken again."""
        self._waiting: dict[int, asyncio.Task[None]] = {}
        """Tasks that wait for the groups in progress."""
        self._next = 0
        """Number from which on no group was dispatched by this process."""
        self._decided: dict[int, int] = {}
        """Number of decided rollouts of each dispatched group that no step took and that is not dropped."""
        self._finished: dict[int, FinishedGroup] = {}
        """Finished groups that no step took, in the order in which they finished."""
        self._drops = Counter[str]()
        """Number of groups that this process dropped, by reason."""
        self._had_replacement: set[int] = set()
        """Groups that had their replacements, because their rewards were all equal, before an outage returned
        them to the queue."""
        self._outages = run.endpoints.outages
        self._limit: int | None = None
        self._group_size = len(rollouts.group_ids(0))
        self.ended = 0
        """Number of rollouts that were decided since the start of this process."""
        self._room_changed, self._finished_changed = rollouts.room_changed, BroadcastCondition()

    async def load(self) -> None:
        """Continue from the starting point, with the steps that the store has recorded since."""
        step, taken = self._run.start.step, self._run.start.groups
        self._sampler.load_state_dict(self._run.start.tasks)
        self._taken, self._logged, self._logged_step = TakenGroups(**taken), TakenGroups(**taken), step
        self._pacer.dispatched = len(self._taken)
        self._pacer.replaced = len(self._taken) - step * self._pacer.groups_per_step
        await self.reload_steps(step)
        for recorded, groups in sorted(self._records.items()):
            self._pacer.dispatched += len(groups.all)
            self._record(recorded, groups)

    async def reload_steps(self, step: int) -> None:
        """Read the groups of the steps after a step, which are taken again."""
        stored = await self._run.store.query_steps(self._run.start.lineage)
        self._records |= {later: groups for later, groups in stored.items() if later > step}

    def taken_up_to(self, step: int) -> JsonObject:
        """Return the groups that were taken up to a step that is logged, or about to be, as plain JSON."""
        for later in range(self._logged_step + 1, step + 1):
            self._logged.add(self._records.pop(later))
        self._logged_step = max(step, self._logged_step)
        return self._logged.to_json()

    def is_recorded(self, step: int) -> bool:
        """Return True if a step was taken before, so that it samples nothing."""
        return step in self._records

    def publish(self, step: int) -> None:
        """Let groups be sampled from the weights after a step, which the engines hold now."""
        self._pacer.published = step
        self._room_changed.notify_all()

    async def sampled_tokens(self, step: int) -> TokenTotals:
        """Return the store's counts of the tokens of all groups, and of those that were not taken up to a
        step that is about to be logged."""
        return await self._run.store.token_totals(
            f"{self._run.start.lineage}-train-", **self.taken_up_to(step)
        )

    async def metrics(self) -> Metrics:
        """Return metrics of the groups of a step: the state of the sampler of tasks."""
        return {f"tasks/{name}": value for name, value in self._sampler.metrics().items()}

    def dropped_ids(self, step: int) -> list[str]:
        return [name for group in self._records[step].dropped for name in self._rollouts.group_ids(group)]

    # dispatch

    @property
    def in_progress(self) -> int:
        """Number of dispatched rollouts that are not decided, including an evaluation's."""
        training = self._group_size * len(self._decided) - sum(self._decided.values())
        return training + self._rollouts.in_evaluation

    def limit(self, rollouts: int) -> None:
        """Dispatch no group while so many rollouts are in progress."""
        self._limit = self._rollouts.limit = rollouts
        self._room_changed.notify_all()

    @contextlib.asynccontextmanager
    async def dispatching(self) -> AsyncIterator[None]:
        """Dispatch groups during the block. Groups in progress at its end are cancelled."""
        async with task_group() as self._tasks:
            dispatching = self._tasks.create_task(self._dispatch())
            try:
                yield
            finally:
                await cancel_all([dispatching, *self._waiting.values()])
                await asyncio.to_thread(self._sampler.close)
                await self._end()

    async def _end(self) -> None:
        await cancel_left(self._run)

    async def _dispatch(self) -> NoReturn:
        """Dispatch groups whenever the pacer allows."""
        while True:
            await self._room_changed.wait_for(lambda: self._room() > 0)
            groups = list(itertools.islice(self._taken.rest(self._next), self._room()))
            draws = await self._draw(groups)
            requests = [self._rollouts.group_requests(*one) for one in zip(groups, draws, strict=True)]
            self._next = groups[-1] + 1
            self._decided |= dict.fromkeys(groups, 0)
            self._pacer.dispatched += len(groups)
            await self._rollouts.enqueue(list(itertools.chain.from_iterable(requests)))
            for group in groups:
                self._waiting[group] = self._tasks.create_task(self._wait(group))

    async def _draw(self, groups: list[int]) -> list[Draw]:
        """Return the tasks of groups; those that an earlier process dispatched keep theirs."""
        async with self._sampling:
            await self._recall(groups)
            return await asyncio.to_thread(lambda: [self._sampler.draw(group) for group in groups])

    async def _recall(self, groups: Iterable[int]) -> None:
        """Have the sampler note the draws of groups that an earlier process dispatched."""
        if self._sampler.learns and not self._run.start.is_fresh:
            for group, place in sorted((await self._rollouts.stored_draws(groups)).items()):
                self._sampler.recall(group, place)

    async def _observe(self, step: int, rollouts: list[FinishedRollout]) -> None:
        """Give the sampler the outcomes of a step, once."""
        if step <= self.observed_step:
            return
        self.observed_step = step
        by_id = {item.rollout.rollout_id: item for item in rollouts}
        async with self._sampling:
            await self._recall(self._records[step].all)  # a step that is taken again draws nothing
            for group in self._records[step].all:
                ids = self._rollouts.group_ids(group)
                own = [self._algorithm.reward_rules.signal(by_id[name]) for name in ids if name in by_id]
                rewards = [reward for reward in own if reward is not None]
                self._sampler.observe(group, statistics.fmean(rewards) if rewards else None)

    def sampler_state(self) -> JsonObject:
        """Return the state of the sampler of tasks, as plain JSON."""
        return self._sampler.state_dict()

    def _room(self) -> int:
        room = self._pacer.room(self._to_replace())
        if self._limit is None or not room:
            return room
        free = -(-(self._limit - self.in_progress) // self._group_size)
        return min(room, max(free, 0 if self._waiting else 1))

    def _to_replace(self) -> int:
        """Return the number of groups that no step has taken and that get a replacement."""
        algorithm, finished = self._algorithm, self._finished.values()
        without_signal = sum(not group.is_informative for group in finished)
        most = (algorithm.max_rounds - 1) * algorithm.tasks_per_step
        n_dropped = self._pacer.dispatched - len(self._taken) - len(self._decided)
        return n_dropped + min(without_signal, most)

    def _dropped(self) -> tuple[int, ...]:
        """Return the groups that the next step drops: all dispatched ones that are not in `_decided`.

        They are computed on demand: a stored set could grow without bound before the next step.
        """
        dispatched = itertools.takewhile(lambda group: group < self._next, self._taken.rest())
        return tuple(group for group in dispatched if group not in self._decided)

    async def _wait(self, group: int) -> None:
        """Wait until all rollouts of a group are decided for good, and read them."""
        ids = self._rollouts.group_ids(group)

        def show(done: int, _: int) -> None:
            self.ended += max(done - self._decided[group], 0)
            self._decided[group] = done
            self._progress(sum(self._decided.values()), len(self._decided) * len(ids))
            self._room_changed.notify_all()

        rollouts = await self._rollouts.grade(await self._until_decided(group, ids, show))
        finished = FinishedGroup(
            rollouts,
            group not in self._had_replacement and self._rules().is_informative(rollouts),
            self._oldest_version(rollouts),
        )
        del self._waiting[group]
        self._finished[group] = finished
        self._room_changed.notify_all()
        self._finished_changed.notify_all()

    async def _until_decided(self, group: int, ids: list[str], show: Progress) -> list[FinishedRollout]:
        """Return the rollouts of a group once they are decided for good."""
        while True:
            await wait_for_rollouts(self._run, ids, show)
            rollouts = await self._rollouts.collect(ids)
            if await end_unresponsive(self._run.store, rollouts):
                return rollouts

    def _oldest_version(self, rollouts: list[FinishedRollout]) -> int | None:
        """Return the version of the oldest token of a group that would be trained; None for no token, or if
        groups are not dropped."""
        return self._rules().oldest_version(rollouts) if self._algorithm.stale == "drop" else None

    def _rules(self) -> BatchRules:
        training = self._run.training
        return self._algorithm.batch_rules(training.learner, training.trained_agents)

    # training steps

    async def take(self, step: int) -> list[FinishedRollout]:
        """Return the rollouts that a step trains on, once they are finished and recorded."""
        if step not in self._records:
            chosen = await self._choose_sound()
            self._check([item for group in chosen for item in self._finished[group].rollouts])
            self._record(step, StepGroups(tuple(chosen), self._dropped()))
        taken = self._records[step]
        found = {group: self._finished.pop(group, None) for group in taken.all}
        # again if the learners were lost meanwhile: the store may lack it
        await self._run.store.record_step(self._run.start.lineage, step, taken)
        rollouts: list[FinishedRollout] = []
        for group in taken.trained:
            known = found[group]
            ids = self._rollouts.group_ids(group)
            rollouts += known.rollouts if known else await self._rollouts.collect(ids)
        await self._observe(step, rollouts)
        return rollouts

    async def _choose_sound(self) -> list[int]:
        """Wait for the groups of the next step; return them when it is known that no outage affected them."""

        def choose() -> list[int] | None:
            self._drop_unusable()
            return choose_groups(
                self._in_order(),
                lambda group: self._finished[group].is_informative,
                self._pacer.groups_per_step,
                self._pacer.groups_per_step * self._algorithm.max_rounds,
            )

        while True:
            chosen = await self._finished_changed.wait_for(choose)
            outages = await self._run.endpoints.confirm()
            if outages == self._outages:
                return chosen
            self._outages = outages
            await self._wait_again()

    async def _wait_again(self) -> None:
        """Wait for all groups that no step took, after an outage: it returned rollouts to the queue that were
        decided, and perhaps being read, before it was known."""
        waiting = dict(self._waiting)
        await cancel_all(waiting.values())
        dropped = self._dropped()
        self._decided |= dict.fromkeys(dropped, self._group_size)
        groups = [*waiting, *self._finished, *dropped]
        self._had_replacement |= {
            group for group, finished in self._finished.items() if not finished.is_informative
        }
        self._finished.clear()
        self._waiting |= {group: self._tasks.create_task(self._wait(group)) for group in groups}

    def _in_order(self) -> Iterator[int]:
        """Yield finished groups in the order in which steps take them."""
        if self._algorithm.stale != "wait":
            return iter(self._finished)
        return itertools.takewhile(self._finished.__contains__, self._taken.rest())

    def _drop_unusable(self) -> None:
        """Drop finished groups that are not to be trained."""
        for group, finished in list(self._finished.items()):
            if (reason := self._drop_reason(finished)) is not None:
                self._drops[reason] += 1
                del self._finished[group], self._decided[group]
                self._room_changed.notify_all()

    def _drop_reason(self, finished: FinishedGroup) -> str | None:
        """Return the reason to drop a group: tokens that are too old, if the algorithm drops them. None: it
        is trained."""
        algorithm, oldest = self._algorithm, finished.oldest_version
        if algorithm.stale != "drop" or oldest is None:
            return None
        return "stale" if oldest < self._run.learners.version - algorithm.max_staleness else None

    def _record(self, step: int, groups: StepGroups) -> None:
        self._records[step] = groups
        self._taken.add(groups)
        self._pacer.replaced += len(groups.all) - self._pacer.groups_per_step
        self._had_replacement -= set(groups.all)
        for group in groups.all:
            self._decided.pop(group, None)
