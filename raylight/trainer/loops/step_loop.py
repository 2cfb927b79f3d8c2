"""Step loop with rollback to a checkpoint.

Law: a step can be repeated. After learners were lost or moved, the loop loads the last training state and
repeats the steps since.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable

from raylight.errors import LearnerLostError
from raylight.trainer.components.run_learner import RunLearner
from raylight.trainer.loops.model_selection import ModelSelection
from raylight.trainer.output.report import Report
from raylight.trainer.spec.resume import ResumePoint, state_metadata
from raylight.trainer.spec.settings import LearningSettings
from raylight.types import JsonObject


class StepLoop(ABC):
    """A loop that takes the steps of a run, one after the other, up to the model in `checkpoint/`.

    Args:
        learner: the learner of the run.
        start: starting point of the run.
        training: the part of the settings.
        config: the run's resolved configuration, which is stored with every training state.
        selection: evaluates the model, and keeps the best one.
    """

    interruptions: tuple[type[Exception], ...] = ()
    """Exceptions that end a step early; it is then taken again."""

    def __init__(
        self,
        learner: RunLearner,
        start: ResumePoint,
        report: Report,
        training: LearningSettings,
        config: JsonObject,
        selection: ModelSelection,
    ) -> None:
        self._learner, self._start, self._report = learner, start, report
        self._checkpoint, self._total, self._config = training.checkpoint, training.total_steps, config
        self._selection, self._evaluated = selection, selection.state_dict()
        """State of the selection after the last logged step, or the last evaluation."""
        self._next = start.step + 1 if start.step else 0
        """The next step; 0 is the evaluation before training."""
        self._reported = self._next - 1
        """Last step whose metrics are logged."""
        self._saved = start.step
        """Last step that has a training state."""
        self._is_fork = start.step > 0 and start.starts_new_lineage
        """True if the state at the starting point must be saved, because it belongs to another lineage."""
        self._is_over = False

    @abstractmethod
    async def _take_step(self, step: int) -> None:
        """Take a step, perhaps again after the learners went back to a training state before it; end the loop
        with `_finish` if there is none."""

    @abstractmethod
    def _progress(self, step: int) -> JsonObject:
        """Return the values of `PROGRESS_KEYS` after a step, without the version."""

    @property
    def _stop_reason(self) -> str | None:
        """Reason to end training early; None to continue."""
        return self._selection.stop_reason

    def _begin(self, notes: Iterable[str] = ()) -> None:
        """Continue the selection from the starting point, and show the notes of the start."""
        if self._start.evaluation is not None:
            self._selection.load_state_dict(self._start.evaluation)
            self._evaluated = self._selection.state_dict()
        for note in (*self._start.notes, *notes):
            self._report.note(note)

    @abstractmethod
    def _prepared(self) -> contextlib.AbstractAsyncContextManager[None]:
        """Return the context of the steps: what comes before them, and what goes on meanwhile."""

    async def run(self) -> None:
        """Take and report all steps, and recover lost learners."""
        fault: LearnerLostError | None = None
        async with self._prepared():
            while not self._is_over:
                try:
                    if fault is not None:
                        await self._go_back(fault)
                        fault = None
                    if self._is_fork:  # the learners could not go back to a state of another lineage
                        await self._save_state(self._start.step)
                        self._is_fork = False
                    if self._learner.drain_noticed.is_set():
                        await self._leave_draining_nodes()
                    with contextlib.suppress(*self.interruptions):
                        await self._take_step(self._next)
                except LearnerLostError as error:
                    self._report.note(f"the learners were lost and are restarted: {error}")
                    fault = error

    async def _end_step(self, step: int) -> None:
        """Save a training state if it is due, and go on to the next step."""
        every = self._checkpoint.every
        if step >= self._reported and step > 0 and every > 0 and step % every == 0:
            await self._save_state(step)
        self._next = step + 1

    async def _finish(self) -> None:
        """Write the last training state, and the model to `checkpoint/`."""
        if self._saved < self._next - 1:
            await self._save_state(self._next - 1)
        if self._next <= self._total and (reason := self._stop_reason) is not None:
            self._report.note(reason)
        with self._report.phase("saving of the model"):
            await self._learner.save(str(self._report.checkpoint))
            await self._learner.finish_saving()
        self._is_over = True

    async def _save_state(self, step: int) -> None:
        progress = self._progress(step) | {"version": self._learner.version}
        await self._learner.save_state(step, state_metadata(self._start, self._config, **progress))
        self._saved = step

    async def _return_to(self, point: ResumePoint) -> None:
        """Continue everything but the place of the loop from a training state."""
        self._selection.load_state_dict(self._evaluated)

    async def _leave_draining_nodes(self) -> None:
        """Save a training state, and move the learners if other nodes have room for them."""
        learner, step = self._learner, self._next - 1
        learner.drain_noticed.clear()
        if step > self._saved and step >= self._reported:
            await self._save_state(step)
            await learner.finish_saving()
        if learner.can_move:
            await self._go_back(None)
            self._report.note(f"the learners have left a node that drains, after step {step}")

    async def _go_back(self, fault: LearnerLostError | None) -> None:
        """Restart lost learners, or those whose node drains (None), with the last training state, after which
        the next step is taken.

        Raises:
            LearnerError: the learners were lost more often than allowed.
        """
        point = await (self._learner.move() if fault is None else self._learner.recover(fault))
        await self._return_to(point)
        self._saved = point.step
        # step 0 follows a restart with the initial weights, if it was not logged
        self._next = point.step + 1 if point.step or self._reported >= 0 else 0
