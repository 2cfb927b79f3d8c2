"""The evaluation beside training, of a version that the engines keep while others are published."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from raylight.trainer.components.publication import PinnedAdapter, Publications
from raylight.trainer.loops.evaluation import Evaluator
from raylight.trainer.output.report import Metrics, Report


@dataclass(frozen=True)
class _InProgress:
    step: int
    pinned: PinnedAdapter
    measuring: asyncio.Task[Metrics]


class PinnedEvaluation:
    """At most one evaluation beside training.

    Its rollouts are a task. Its end, which may need the learners, is a part of the loop, and can be repeated
    after these were lost.
    """

    def __init__(self, evaluator: Evaluator, publications: Publications, report: Report) -> None:
        self._evaluator, self._publications, self._report = evaluator, publications, report
        self._current: _InProgress | None = None

    @property
    def step(self) -> int | None:
        """Step that is evaluated; None if there is no evaluation."""
        return self._current.step if self._current else None

    @property
    def has_ended(self) -> bool:
        """True if its rollouts have ended."""
        return self._current is not None and self._current.measuring.done()

    @property
    def tasks(self) -> list[asyncio.Task[Metrics]]:
        """The task of its rollouts, to be cancelled with the training."""
        return [self._current.measuring] if self._current else []

    async def begin(self, step: int) -> None:
        """Begin the evaluation of a step whose weights are published; there is no other one.

        Raises:
            WeightSyncError: the engines cannot keep the version.
        """
        assert self._current is None
        pinned = await self._publications.pin(step)
        measuring = asyncio.create_task(self._evaluator.measure(step, pinned))
        self._current = _InProgress(step, pinned, measuring)

    async def end(self, logged: int) -> None:
        """Wait for the rollouts, save the version if it is the best, and log the metrics in their own row.

        Args:
            logged: last step that is logged; the row comes after it.

        Raises:
            ConfigError, RaylightError: see `Evaluator.measure` and `Evaluator.compare`.
        """
        current = self._current
        assert current is not None
        metrics = await asyncio.shield(current.measuring)
        await self._evaluator.compare(current.step, metrics, current.pinned)
        await self._publications.release(current.pinned)
        self._report.evaluation(current.step, logged, metrics)
        self._current = None
