"""The synchronous loop: roll out, update, publish, validate. What it learns is the algorithm's settings; where, the session's.

A step can be taken again: its rollouts are in the store by name, its tasks follow from their number, and its update from the state
before it. So a run goes on after its driver or its learners were lost.
"""

from __future__ import annotations

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
from raylight.trainer.policy_session import PolicySession
from raylight.trainer.report import Metrics, Report
from raylight.trainer.resume import describe as describe_place
from raylight.types import FinishedRollout

T = TypeVar("T")


class Training:
    """The planned steps of a run, from its start to the model in `checkpoint/`.

    Args:
        config: the run's resolved configuration, which is kept with every training state.
    """

    def __init__(
        self,
        session: PolicySession,
        algorithm: PolicyAlgorithm,
        train_tasks: list[Any],
        val_tasks: list[Any],
        report: Report,
        config: dict[str, Any],
    ) -> None:
        self._session, self._algorithm, self._report, self._config = session, algorithm, report, config
        self._tasks = TaskSampler(train_tasks, algorithm.tasks_per_step, session.plan.seed)
        self._evaluator = Evaluator(session, algorithm, val_tasks, report)
        self._without_signal = 0
        """Steps in a row from which there was nothing to learn."""

    async def run(self) -> None:
        """Train, reporting each step."""
        session, start = self._session, self._session.start
        self._tasks.seek(start.taken)
        self._without_signal = start.without_signal
        if start.evaluation is not None:
            self._evaluator.load_state_dict(start.evaluation)
        for note in start.notes:
            self._report.note(note)
        if start.step and start.is_another:
            await self._save_state(start.step)
        if start.step == 0:
            session.set_step(0)
            if before := await self._with_recovery(0, self._evaluator.before_training):
                self._report.step(0, before)
        done = await self._take_steps(start.step, session.plan.total_steps)
        await self._with_recovery(done + 1, self._finish)

    async def _finish(self) -> None:
        await self._session.learners.save(str(self._report.checkpoint))
        await self._session.learners.finish_saving()

    async def _take_steps(self, done: int, total: int) -> int:
        """All steps after `done`; returns the last."""
        if done and (reason := self._stop_reason) is not None:  # the run had ended
            self._report.note(reason)
            return done
        for step in range(done + 1, total + 1):
            reason = await self._step(step, total)
            done, last = step, reason is not None or step == total
            every = self._session.plan.checkpoint.every
            if last or (every and step % every == 0):
                await self._save_state(step)
            if reason is not None:
                self._report.note(reason)
                break
        return done

    async def _step(self, step: int, total: int) -> str | None:
        """Take a step and report it; returns why training should end after it, if it should."""
        evaluation, without_signal, taken = (
            self._evaluator.state_dict(),
            self._without_signal,
            self._tasks.consumed,
        )

        async def attempt() -> tuple[Metrics, str | None]:
            self._evaluator.load_state_dict(evaluation)
            self._tasks.seek(taken)
            self._session.set_step(step)
            metrics, learned = await self._learn(step)
            self._without_signal = 0 if learned else without_signal + 1
            metrics |= await self._evaluator.after(step, last=self._learns_no_more or step == total)
            return metrics, self._stop_reason if self._learns_no_more or step < total else None

        metrics, reason = await self._with_recovery(step, attempt)
        self._report.step(step, metrics | {"learner/restarts": float(self._session.restarts)})
        return reason

    @property
    def _learns_no_more(self) -> bool:
        return self._without_signal >= self._algorithm.max_steps_without_signal

    @property
    def _stop_reason(self) -> str | None:
        """Why training should end early; None if it should go on."""
        if not self._learns_no_more:
            return self._evaluator.stop_reason
        return (
            f"no group showed a difference for {self._without_signal} steps in a row, so training ends early: either the task is "
            "learned, or its reward does not tell good from bad"
        )

    async def _learn(self, step: int) -> tuple[Metrics, bool]:
        """Roll out and update; returns metrics and whether there was anything to learn from."""
        session, report = self._session, self._report
        started = time.perf_counter()
        finished = await self._gather(step)
        rollout_s = time.perf_counter() - started
        report.failures(finished)
        raise_if_hopeless(finished, self._algorithm.failure_reward)
        batch, content = self._batch(finished)
        metrics = describe(finished, content, rollout_s)
        report.drift(content)
        if not content.has_signal:
            return metrics, False
        started = time.perf_counter()
        metrics |= await session.update(batch)
        report.mismatch(metrics)
        updated = time.perf_counter()
        metrics["weights/version"] = float(session.version)
        metrics["time/update_s"] = updated - started
        if not session.replaying:  # else whatever is sampled next brings it about
            _, parity = await session.publish_weights(self._algorithm.sync_timeout_s)
            metrics["mismatch/probe_abs_mean"] = parity.mean_abs
            metrics["time/sync_s"] = time.perf_counter() - updated
        return metrics, True

    async def _gather(self, step: int) -> list[FinishedRollout]:
        return await gather(self._session, self._algorithm, self._tasks, step, self._report)

    def _batch(self, finished: list[FinishedRollout]) -> tuple[TrainBatch, BatchReport]:
        plan = self._session.plan
        return self._algorithm.build_train_batch(finished, plan.learner, plan.trained_agents)

    # states, and what to do when learners are lost

    async def _save_state(self, step: int) -> None:
        """Have the training state after a step written."""
        session = self._session
        about = describe_place(
            session.start,
            self._config,
            version=session.version,
            taken=self._tasks.consumed,
            without_signal=self._without_signal,
            evaluation=self._evaluator.state_dict(),
        )
        plan = session.plan
        await self._with_recovery(
            step + 1, lambda: session.learners.save_state(plan.state_url, step, about, plan.checkpoint.keep)
        )

    async def _with_recovery(self, step: int, work: Callable[[], Awaitable[T]]) -> T:
        """Do work that is part of a step; when the learners are lost meanwhile, bring them to where they were before the step, and
        begin again.

        Raises:
            LearnerError: they were lost too often.
        """
        fault: LearnerLostError | None = None
        while True:
            try:
                if fault is not None:
                    await self._replay_until(fault, step - 1)
                return await work()
            except LearnerLostError as error:
                self._report.note(f"the learners were lost and start anew: {error}")
                fault = error

    async def _replay_until(self, fault: LearnerLostError, done: int) -> None:
        """Learners that were lost come to the state after the step `done` again."""
        session = self._session
        place = await session.recover(fault)
        self._tasks.seek(place.taken)
        for step in range(place.step + 1, done + 1):
            self._report.stage(f"taking step {step} again")
            session.set_step(step)
            batch, content = self._batch(await self._gather(step))
            if content.has_signal:
                await session.update(batch)
        session.caught_up()
