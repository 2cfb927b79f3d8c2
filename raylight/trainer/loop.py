"""The synchronous training loop: roll out, update, publish weights, evaluate.

A step can be replayed: the store has its rollouts by name, its tasks follow from their number, and its update
follows from the training state before it. A run therefore resumes after its driver or its learners were lost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from raylight.algorithms.policy import PolicyAlgorithm
from raylight.errors import LearnerLostError
from raylight.experience.batch import BatchReport, TrainBatch
from raylight.experience.task_sampler import TaskSampler
from raylight.trainer.evaluation import Evaluator
from raylight.trainer.gather import gather
from raylight.trainer.outcome import describe, raise_if_hopeless
from raylight.trainer.policy_rollouts import PolicyRollouts
from raylight.trainer.report import Metrics, Report
from raylight.trainer.resume import state_metadata
from raylight.types import FinishedRollout

T = TypeVar("T")


class Training:
    """The planned steps of a run, from its starting point to the model in `checkpoint/`.

    Args:
        config: the run's resolved configuration, which is stored with every training state.
    """

    def __init__(
        self,
        rollouts: PolicyRollouts,
        algorithm: PolicyAlgorithm,
        train_tasks: list[Any],
        val_tasks: list[Any],
        report: Report,
        config: dict[str, Any],
    ) -> None:
        self._run, self._rollouts = rollouts.run, rollouts
        self._algorithm, self._report, self._config = algorithm, report, config
        self._sampler = TaskSampler(train_tasks, algorithm.tasks_per_step, self._run.settings.seed)
        self._evaluator = Evaluator(rollouts, algorithm, val_tasks, report)
        self._steps_without_signal = 0
        """Steps in a row that gave nothing to learn."""

    async def run(self) -> None:
        """Train and report each step."""
        start = self._run.start
        self._sampler.seek(start.tasks_consumed)
        self._steps_without_signal = start.steps_without_signal
        if start.evaluation is not None:
            self._evaluator.load_state_dict(start.evaluation)
        for note in start.notes:
            self._report.note(note)
        if start.step and start.starts_new_lineage:
            await self._save_state(start.step)
        if start.step == 0:
            self._rollouts.set_step(0)
            if metrics := await self._with_recovery(0, self._evaluator.before_training):
                self._report.step(0, metrics)
        last_step = await self._take_steps(start.step, self._run.training.total_steps)
        await self._with_recovery(last_step + 1, self._finish)

    async def _finish(self) -> None:
        await self._run.learners.save(str(self._report.checkpoint))
        await self._run.learners.finish_saving()

    async def _take_steps(self, done: int, total: int) -> int:
        """Take the steps after `done`; return the last one that was taken."""
        if done and (reason := self._stop_reason) is not None:  # the resumed run had ended early
            self._report.note(reason)
            return done
        for step in range(done + 1, total + 1):
            reason = await self._step(step, total)
            done, last = step, reason is not None or step == total
            every = self._run.training.checkpoint.every
            if last or (every and step % every == 0):
                await self._save_state(step)
            if reason is not None:
                self._report.note(reason)
                break
        return done

    async def _step(self, step: int, total: int) -> str | None:
        """Take a step and report it; return the reason to end training after it, or None."""
        evaluation = self._evaluator.state_dict()
        steps_without_signal, tasks_consumed = self._steps_without_signal, self._sampler.consumed

        async def attempt() -> tuple[Metrics, str | None]:
            self._evaluator.load_state_dict(evaluation)
            self._sampler.seek(tasks_consumed)
            self._rollouts.set_step(step)
            metrics, has_signal = await self._learn(step)
            self._steps_without_signal = 0 if has_signal else steps_without_signal + 1
            metrics |= await self._evaluator.after(step, last=self._signal_lost or step == total)
            return metrics, self._stop_reason if self._signal_lost or step < total else None

        metrics, reason = await self._with_recovery(step, attempt)
        counters = {"learner/restarts": float(self._run.learners.restarts), **self._run.serving.metrics()}
        self._report.step(step, metrics | counters)
        return reason

    @property
    def _signal_lost(self) -> bool:
        return self._steps_without_signal >= self._algorithm.max_steps_without_signal

    @property
    def _stop_reason(self) -> str | None:
        """Reason to end training early; None to continue."""
        if not self._signal_lost:
            return self._evaluator.stop_reason
        return (
            f"training ends early: in the last {self._steps_without_signal} steps no group had rewards that "
            "differ. Either the task is learned, or its reward does not separate good rollouts from bad "
            "ones, or no token could be trained: a schema left the model no choice "
            "(constrained/forced_fraction in metrics.jsonl), or calls are masked (off_policy/fraction)"
        )

    async def _learn(self, step: int) -> tuple[Metrics, bool]:
        """Roll out and update; return the metrics, and True if there was anything to learn from."""
        learners, algorithm, report = self._run.learners, self._algorithm, self._report
        started = time.perf_counter()
        finished = await gather(self._rollouts, algorithm, self._sampler, step, report)
        rollout_s = time.perf_counter() - started
        report.failures(finished)
        raise_if_hopeless(finished, algorithm.failure_reward)
        batch, content = await self._build_batch(finished)
        metrics = describe(finished, content, rollout_s, algorithm.failure_reward)
        report.batch(content)
        if not content.has_signal:
            return metrics, False
        started = time.perf_counter()
        metrics |= await learners.update(batch)
        report.mismatch(metrics)
        updated = time.perf_counter()
        metrics["weights/version"] = float(learners.version)
        metrics["time/update_s"] = updated - started
        if not self._rollouts.replaying:  # a replay publishes before it samples
            if (parity := await learners.publish()) is not None:
                metrics["mismatch/probe_abs_mean"] = parity.mean_abs
            metrics["time/sync_s"] = time.perf_counter() - updated
        return metrics, True

    async def _build_batch(self, finished: list[FinishedRollout]) -> tuple[TrainBatch, BatchReport]:
        """Build the learners' batch in a thread, so that long rollouts do not block the event loop."""
        training = self._run.training
        return await asyncio.to_thread(
            self._algorithm.build_train_batch, finished, training.learner, training.trained_agents
        )

    # training states and recovery of lost learners

    async def _save_state(self, step: int) -> None:
        """Save the training state after a step."""
        learners = self._run.learners
        metadata = state_metadata(
            self._run.start,
            self._config,
            version=learners.version,
            tasks_consumed=self._sampler.consumed,
            steps_without_signal=self._steps_without_signal,
            evaluation=self._evaluator.state_dict(),
        )
        await self._with_recovery(step + 1, lambda: learners.save_state(step, metadata))

    async def _with_recovery(self, step: int, work: Callable[[], Awaitable[T]]) -> T:
        """Do work that is part of a step. After a loss of learners, restore them to the state before the step
        and retry.

        Raises:
            LearnerError: the learners were lost more often than allowed.
        """
        fault: LearnerLostError | None = None
        while True:
            try:
                if fault is not None:
                    await self._replay_until(fault, step - 1)
                return await work()
            except LearnerLostError as error:
                self._report.note(f"the learners were lost and are restarted: {error}")
                fault = error

    async def _replay_until(self, fault: LearnerLostError, last_step: int) -> None:
        """Restart lost learners and replay the steps since the last training state, up to `last_step`."""
        rollouts, algorithm = self._rollouts, self._algorithm
        point = await rollouts.recover(fault)
        self._sampler.seek(point.tasks_consumed)
        for step in range(point.step + 1, last_step + 1):
            self._report.stage(f"replaying step {step}")
            rollouts.set_step(step)
            finished = await gather(rollouts, algorithm, self._sampler, step, self._report)
            batch, content = await self._build_batch(finished)
            if content.has_signal:
                await self._run.learners.update(batch)
        rollouts.end_replay()
