"""The place of a loop of steps, and its return to a training state.

Law: a step can be taken again. After learners were lost or moved, the loop goes on after the last training
state, and takes the steps since then again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from raylight.errors import LearnerLostError
from raylight.trainer.components.learner_ranks import LearnerRanks
from raylight.trainer.output.report import Report
from raylight.trainer.spec.resume import ResumePoint


class StepLoop(ABC):
    """A loop that takes the steps of a run, one after the other.

    Args:
        ranks: the learners.
        start: starting point of the run.
    """

    def __init__(self, ranks: LearnerRanks, start: ResumePoint, report: Report) -> None:
        self._ranks, self._start, self._report = ranks, start, report
        self._next = start.step + 1 if start.step else 0
        """The next step; 0 is the evaluation before training."""
        self._reported = self._next - 1
        """Last step whose metrics are logged."""
        self._saved = start.step
        """Last step that has a training state."""

    @abstractmethod
    async def _save_state(self, step: int) -> None:
        """Save a training state after a step."""

    @abstractmethod
    async def _return_to(self, point: ResumePoint) -> None:
        """Continue everything but the place of the loop from a training state."""

    async def _leave_draining_nodes(self) -> None:
        """Save a training state, and move the learners if other nodes have room for them."""
        ranks, step = self._ranks, self._next - 1
        ranks.drain_noticed.clear()
        if step > self._saved and step >= self._reported:
            await self._save_state(step)
            await ranks.finish_saving()
        if ranks.can_move:
            await self._go_back(None)
            self._report.note(f"the learners have left a node that drains, after step {step}")

    async def _go_back(self, fault: LearnerLostError | None) -> None:
        """Restart lost learners, or those whose node drains (None), with the last training state, after which
        the next step is taken.

        Raises:
            LearnerError: the learners were lost more often than allowed.
        """
        point = await (self._ranks.move() if fault is None else self._ranks.recover(fault))
        await self._return_to(point)
        self._saved = point.step
        # step 0 follows a restart with the initial weights, if it was not logged
        self._next = point.step + 1 if point.step or self._reported >= 0 else 0
