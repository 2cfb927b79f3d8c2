"""Training loop of policy-gradient algorithms, synchronous and asynchronous.

A step takes finished groups of rollouts, updates the weights with them, publishes these to the engines, and
evaluates them. With `max_staleness=0` the next step samples after that. Otherwise its groups are sampled
meanwhile, from weights that are at most so many steps older, and a publication runs during the next update.
So does the evaluation of an adapter, which engines can keep under a separate name.

Laws:
- A step can be taken again: the store has its groups, and its update follows from the training state before
  it. A run therefore resumes after its driver was lost, and goes back when its learners were.
- Engines hold at most one version less than the learners when an update begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any, NoReturn, TypeVar

from raylight._utils.aio import cancel_all
from raylight.errors import LearnerLostError
from raylight.experience.batches.batch import BatchReport, TrainBatch, build_batch
from raylight.experience.batches.ledger import Ledger
from raylight.tasks.task_set import TaskSet
from raylight.trainer.components.opponents import ServedOpponents
from raylight.trainer.components.run_components import PolicyComponents
from raylight.trainer.components.run_learner import NodeDrains
from raylight.trainer.loops.batch_metrics import describe, explain_no_signal, raise_if_hopeless
from raylight.trainer.loops.evaluation import Evaluator, PinnedEvaluation
from raylight.trainer.loops.load_watch import LoadWatch
from raylight.trainer.loops.policy_rollouts import PolicyRollouts
from raylight.trainer.loops.step_loop import StepLoop
from raylight.trainer.loops.training_groups import TrainingGroups
from raylight.trainer.output.report import Metrics, Report
from raylight.trainer.spec.resume import ResumePoint
from raylight.types import FinishedRollout, JsonObject

T = TypeVar("T")


class TrainingStopped(Exception):
    """The training was asked to end; what it waits for is not needed any more."""


class StopRequest:
    """Asks a training to end: an update that has begun is completed, and the weights are saved."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def __call__(self) -> None:
        """Ask for the end, in the event loop of the training."""
        self._event.set()

    @property
    def is_made(self) -> bool:
        """True once the end was asked for."""
        return self._event.is_set()

    async def wait(self) -> NoReturn:
        """Raise TrainingStopped as soon as the end is asked for."""
        await self._event.wait()
        raise TrainingStopped


class PolicyLoop(StepLoop):
    """The planned steps of a run, from its starting point to the model in `checkpoint/`.

    Args:
        config: as for `StepLoop`.
        stop: asks for an early end.
        groups: the kind of groups that the steps train on.
    """

    interruptions = (NodeDrains, TrainingStopped)

    def __init__(
        self,
        run: PolicyComponents,
        train_tasks: TaskSet,
        val_tasks: list[object],
        report: Report,
        config: JsonObject,
        stop: StopRequest | None = None,
        groups: type[TrainingGroups] = TrainingGroups,
    ) -> None:
        start, learners, algorithm = run.start, run.learners, run.training.algorithm
        self._rollouts = PolicyRollouts(run, report.note)
        self._evaluator = Evaluator(self._rollouts, learners, algorithm, val_tasks, report)
        super().__init__(learners, start, report, run.training, config, self._evaluator)
        self._run, self._algorithm, self._learners = run, algorithm, learners
        self._stop = stop or StopRequest()
        self._repeated_tasks = self._algorithm.repeated_tasks(train_tasks.size or 0)
        self._steps_without_signal = start.steps_without_signal
        """Steps in a row that gave nothing to learn."""
        progress = report.rollout_progress("train")
        self._groups = groups(run, self._rollouts, train_tasks, self._check, progress)
        self._loads = LoadWatch(run.learners.replicas, self._groups, run.runners.most_rollouts)
        self._ledger = Ledger()
        if not start.starts_new_lineage:
            self._ledger.load_state_dict(start.ledger)
        self._concurrent_eval = PinnedEvaluation(self._evaluator, self._learners.publications, report)
        self._cut_off: int | None = (start.evaluation or {}).get("beside")
        """Step of an evaluation that was in progress during training when the starting point was saved."""
        self._opponents: ServedOpponents | None = None
        if (self_play := algorithm.opponents) is not None:
            publications, seed = self._learners.publications, run.settings.seed
            self._opponents = ServedOpponents(self_play, seed, publications, report.folder)
            self._rollouts.opponents = self._opponents
        self._publication: asyncio.Task[Metrics] | None = None
        """The last publication of weights, which may be in progress."""
        self._published: int | None = None
        """Step whose weights it publishes."""
        self._taken_at = time.perf_counter()
        """Time at which the last step had its rollouts."""

    @contextlib.asynccontextmanager
    async def _prepared(self) -> AsyncIterator[None]:
        self._begin()
        await self._rollouts.add_resources()
        if self._opponents is not None:
            await self._opponents.restore(self._run.start.opponents)
            await self._rollouts.offer_opponents(self._opponents.names.values())
        await self._groups.load()
        watching = self._loads.watching() if self._is_asynchronous else contextlib.nullcontext()
        async with self._groups.dispatching(), self._beside_training(), watching:
            yield

    async def _take_step(self, step: int) -> None:
        await self._resume_evaluation()
        if self._concurrent_eval.has_ended:
            await self._end_evaluation()
        is_new, samples_next = step > self._reported, not self._groups.is_recorded(step + 1)
        if step > self._total or (is_new and self._stop_reason is not None):
            return await self._finish()
        if step > 0:
            await self._add_opponent(step - 1)
        if not self._groups.is_recorded(step):
            await self._let_sample(step - 1)
        metrics, has_signal = await self._learn(step) if step else ({}, True)
        if is_new and step == self._total and self._repeated_tasks:
            self._report.note(
                f"step {step} is the last and was filled from one more pass over the tasks: "
                f"{self._repeated_tasks} of its {self._algorithm.tasks_per_step} tasks"
            )
        without_signal = 0 if has_signal else self._steps_without_signal + 1
        is_last = step == self._total or without_signal >= self._algorithm.max_steps_without_signal
        evaluates = is_new and self._evaluator.is_due(step, is_last)
        if evaluates or samples_next:
            metrics |= await self._publish(step, waits=evaluates or not self._is_asynchronous)
        if evaluates:
            metrics |= await self._evaluate(step)
        if is_new and (step or evaluates):  # without an evaluation, step 0 is nothing
            self._steps_without_signal = without_signal
            await self._log(step, metrics)
        await self._end_step(step)

    async def _learn(self, step: int) -> tuple[Metrics, bool]:
        """Update the weights; return the metrics, and False if there was nothing to learn from."""
        algorithm, report, training = self._algorithm, self._report, self._run.training
        if step <= self._reported:
            report.stage(f"replaying step {step}")
        started = time.perf_counter()
        interruptions = self._learners.wait_for_drain(), self._stop.wait()
        rollouts = await self._until_failure(self._groups.take(step), *interruptions)
        ended = time.perf_counter()
        wait_s, cycle_s, self._taken_at = ended - started, ended - self._taken_at, ended
        rules = algorithm.batch_rules(training.learner, training.trained_agents, self._learners.version)
        # long rollouts do not block the event loop
        batch, content = await asyncio.to_thread(build_batch, rollouts, rules)
        await self._enter(step, rollouts, content)
        rollout_s = cycle_s if self._is_asynchronous else wait_s
        metrics = describe(rollouts, content, rollout_s, algorithm.failure_reward)
        if self._is_asynchronous:
            metrics |= {
                "async/trainer_idle_s": wait_s,
                "async/publish_lag": float(self._learners.version - self._learners.publications.published),
                "async/dropped_rollouts": float(len(self._groups.dropped_ids(step))),
            }
        if self._opponents is not None:
            metrics |= self._opponents.record(rollouts, algorithm.failure_reward)
        report.batch(content)
        if not content.has_signal:
            return metrics, False
        if digests := batch.image_digests:
            batch = replace(batch, image_files=await self._run.store.read_images(digests))
        if (teachers := self._run.teachers) is not None:
            with report.phase("scoring by the teacher"):
                batch, found = await self._until_failure(teachers.score(batch, rollouts))
            metrics |= found
        started = time.perf_counter()
        with report.phase("update of the weights"):
            metrics |= await self._learners.update(batch)
        await self._record_tokens(step, batch)
        metrics["weights/version"] = float(self._learners.version)
        metrics["time/update_s"] = time.perf_counter() - started
        return metrics, True

    async def _record_tokens(self, step: int, batch: TrainBatch) -> None:
        """Keep the log-probs and advantages of a step's tokens, to look at."""
        records = await self._learners.learner.row_records()
        owners = [row.rollout_id for row in batch.rows]
        await asyncio.to_thread(self._report.row_records, step, records, owners)

    def _check(self, rollouts: list[FinishedRollout]) -> None:
        """Report the failures of a step's rollouts.

        Raises:
            RaylightError: no rollout has a reward (see `raise_if_hopeless`).
        """
        self._report.failures(rollouts)
        raise_if_hopeless(rollouts, self._algorithm.failure_reward, self._algorithm.needs_rewards)

    async def _enter(self, step: int, rollouts: list[FinishedRollout], content: BatchReport) -> None:
        """Enter the tokens of a step into the ledger."""
        dropped = self._groups.dropped_ids(step)
        ids = [item.rollout.rollout_id for item in rollouts]
        counts = await self._run.store.count_sampled_tokens([*ids, *dropped])
        self._ledger.take(rollouts, content, counts, dropped)

    async def _log(self, step: int, metrics: Metrics) -> None:
        counters = {"learner/restarts": float(self._learners.restarts), **self._run.endpoints.metrics()}
        counters |= self._run.reward_models.metrics()
        counters |= self._run.runners.metrics() | await self._groups.metrics()
        counters |= self._ledger.row(await self._groups.sampled_tokens(step)).metrics()
        counters |= self._ledger.length_metrics() | self._ledger.model_metrics()
        if self._is_asynchronous:
            counters |= self._loads.metrics()
        self._report.step(step, metrics | counters)
        self._reported, self._evaluated = step, self._evaluator.state_dict()

    # evaluations

    async def _evaluate(self, step: int) -> Metrics:
        """Evaluate the weights after a step, which are published; return the metrics, or none if training
        goes on meanwhile."""
        if not self._learners.pins:
            return await self._until_failure(self._evaluator.evaluate(step))
        if self._concurrent_eval.step is not None:
            await self._end_evaluation()
        await self._until_failure(self._concurrent_eval.begin(step))
        return {}

    async def _end_evaluation(self) -> None:
        """Wait for the evaluation during training, and report it."""
        await self._until_failure(self._concurrent_eval.end(max(self._reported, 0)))
        self._evaluated = self._evaluator.state_dict()

    async def _resume_evaluation(self) -> None:
        """Take the evaluation again that was cut off with the last process of the run, if its version is that
        of the starting point, unless it ended after this."""
        if (step := self._cut_off) is None:
            return
        if (metrics := self._report.evaluation_of(step)) is not None:
            await self._evaluator.compare(step, metrics, saves=False)
            self._evaluated = self._evaluator.state_dict()
        elif step == self._next - 1 and self._learners.pins:
            await self._publish(step, waits=True)
            await self._evaluate(step)
        else:
            self._report.note(
                f"the evaluation of step {step} was cut off and is left out: no state has its weights"
            )
        self._cut_off = None

    # publication of weights

    @contextlib.asynccontextmanager
    async def _beside_training(self) -> AsyncIterator[None]:
        """Cancel the publication and the evaluation that are in progress at the end of the block."""
        try:
            yield
        finally:
            publications = [self._publication] if self._publication else []
            await cancel_all([*publications, *self._concurrent_eval.tasks])

    @property
    def _is_asynchronous(self) -> bool:
        return self._algorithm.max_staleness > 0

    async def _let_sample(self, step: int) -> None:
        """Let groups be sampled from the weights after a step, now or when its publication has ended."""
        await self._publish(step, waits=not self._is_asynchronous)
        if not self._is_asynchronous:
            self._groups.publish(step)

    async def _add_opponent(self, step: int) -> None:
        """Make the policy after a step an opponent, if one is due."""
        opponents = self._opponents
        if opponents is None or not opponents.pool.is_due(step):
            return
        is_repeated = self._groups.is_recorded(step + 1)
        if not is_repeated:
            await self._publish(step, waits=True)
        await self._until_failure(opponents.add(step, self._learners.version, is_repeated))
        await self._rollouts.offer_opponents(opponents.names.values())

    async def _publish(self, step: int, waits: bool) -> Metrics:
        """Publish the weights after a step; return the metrics of the last publication that ended.

        Args:
            waits: wait until the publication has ended.
        """
        metrics: Metrics = {}
        if self._publication is None or self._published != step:
            if self._publication is not None:
                metrics = await self._until_failure(self._publication)
            self._published, self._publication = step, asyncio.create_task(self._send(step))
        return await self._until_failure(self._publication) if waits else metrics

    async def _send(self, step: int) -> Metrics:
        started, version = time.perf_counter(), self._learners.version
        publications = self._learners.publications
        if version > publications.published or self._is_asynchronous:
            with self._report.phase("publication of the weights"):
                parity = await publications.publish(version)
        else:  # the engines have the weights, perhaps from learners that were lost since
            parity = None
            publications.notice_version()
        if self._is_asynchronous:
            self._groups.publish(step)
        if parity is None:
            return {}
        probed = {"mismatch/probe_abs_mean": parity.mean_abs} if parity.tokens else {}
        return probed | {"time/sync_s": time.perf_counter() - started}

    # end of the training, training states, and recovery of lost learners

    @property
    def _stop_reason(self) -> str | None:
        if self._stop.is_made:
            return f"training was stopped before step {self._next}"
        if self._steps_without_signal < self._algorithm.max_steps_without_signal:
            return super()._stop_reason
        return explain_no_signal(self._steps_without_signal)

    async def _finish(self) -> None:
        """Write the model to `checkpoint/`, when the engines have its weights too."""
        if self._publication is not None:
            await self._until_failure(self._publication)
        if self._concurrent_eval.step is not None:
            await self._end_evaluation()
        await super()._finish()

    def _progress(self, step: int) -> JsonObject:
        return {
            "groups": self._groups.taken_up_to(step),
            "tasks": self._groups.sampler_state(),
            "observed_step": self._groups.observed_step,
            "steps_without_signal": self._steps_without_signal,
            "evaluation": self._evaluator.state_dict() | {"beside": self._concurrent_eval.step},
            "ledger": self._ledger.state_dict(),
            "opponents": {} if self._opponents is None else self._opponents.pool.state_dict(),
        }

    async def _until_failure(self, work: Awaitable[T], *others: Awaitable[object]) -> T:
        """Await work that may never end if a publication, or the learners, have failed.

        Args:
            others: also raise their errors.

        Raises:
            LearnerError, WeightSyncError: the failure.
        """
        working: asyncio.Future[T] = asyncio.ensure_future(work)
        failure = self._learners.publications.wait_for_failure()
        failing = [asyncio.ensure_future(w) for w in (failure, *others)]
        pending: set[asyncio.Future[Any]] = {working, *failing}
        pending |= {self._publication} if self._publication else set()
        try:
            while not working.done():
                ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in ended - {working}:
                    task.result()
            return working.result()
        finally:
            await cancel_all([working, *failing])

    async def _go_back(self, fault: LearnerLostError | None) -> None:
        if self._publication is not None:
            await cancel_all([self._publication])
        self._publication = self._published = None
        await super()._go_back(fault)

    async def _return_to(self, point: ResumePoint) -> None:
        await super()._return_to(point)
        self._ledger.load_state_dict(point.ledger)
        if self._opponents is not None:
            await self._opponents.restore(point.opponents)
        await self._groups.reload_steps(point.step)
