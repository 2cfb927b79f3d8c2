"""Evaluation of the policy on tasks that it is never trained on, between steps or while training goes on."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass

from raylight.algorithms.policy import PolicyAlgorithm
from raylight.tasks.task_set import ShuffledTasks
from raylight.trainer.components.publication import PinnedAdapter, Publications
from raylight.trainer.components.run_learner import RunLearner
from raylight.trainer.loops.batch_metrics import by_source, raise_if_hopeless
from raylight.trainer.loops.model_selection import ModelSelection
from raylight.trainer.loops.policy_rollouts import PolicyRollouts
from raylight.trainer.output.report import Metrics, Report
from raylight.trainer.output.sampled_rollouts import example_ids, sampled_rollout
from raylight.trainer.output.scores import Scores, measure, reward_of_failures
from raylight.types import FinishedRollout


class Evaluator(ModelSelection):
    """Evaluates the policy on validation tasks before, during and after training.

    Args:
        tasks: validation tasks; without any, nothing is evaluated.
    """

    def __init__(
        self,
        rollouts: PolicyRollouts,
        learners: RunLearner,
        algorithm: PolicyAlgorithm,
        tasks: list[object],
        report: Report,
    ) -> None:
        super().__init__(learners, algorithm, report, ShuffledTasks(tasks).fingerprint() if tasks else None)
        self._rollouts, self._algorithm, self._tasks = rollouts, algorithm, tasks
        self._reported_others = False

    async def evaluate(self, step: int) -> Metrics:
        """Evaluate the policy after a step, and compare it with the best so far; return the metrics.

        Raises:
            ConfigError, RaylightError: see `measure` and `compare`.
        """
        metrics = await self.measure(step)
        await self.compare(step, metrics)
        return metrics

    async def measure(self, step: int, pinned: PinnedAdapter | None = None) -> Metrics:
        """Return the metrics of the policy after a step.

        Args:
            pinned: the version after the step, if training goes on meanwhile.

        Raises:
            RaylightError: no rollout was scored (see `raise_if_hopeless`).
        """
        started = time.perf_counter()
        algorithm, report = self._algorithm, self._report
        finished = await self._rollouts.evaluate(
            step,
            self._tasks,
            algorithm.val_samples,
            report.rollout_progress("val"),
            pinned.names if pinned else None,
        )
        if pinned is not None:
            self._check_versions(finished, pinned)
        report.failures(finished)
        if report.takes_rollouts:
            examples = await self._rollouts.with_spans(example_ids(finished))
            report.rollouts(step, [sampled_rollout(example) for example in examples])
        raise_if_hopeless(finished, algorithm.failure_reward)
        metrics = describe_scores(
            measure(finished, algorithm.val_samples, algorithm.failure_reward, algorithm.pass_reward)
        )
        of_failures = reward_of_failures(finished, algorithm.failure_reward)
        for source, values in by_source(finished, of_failures).items():
            metrics[f"val/source/{source}/reward"] = statistics.fmean(values)
        metrics["time/val_s"] = time.perf_counter() - started
        return metrics

    def _check_versions(self, finished: list[FinishedRollout], pinned: PinnedAdapter) -> None:
        """Show once that calls were not sampled from the pinned version."""
        calls = [call for item in finished for call in item.generations if call.model in pinned.names]
        others = sum(bool((call.weight_versions != pinned.version).any()) for call in calls)
        if others and not self._reported_others:
            self._reported_others = True
            served = ", ".join(map(repr, pinned.names.values()))
            self._report.note(
                f"{others} of {len(calls)} calls of the evaluation were not sampled from the weights of its "
                f"step, which the engines serve as {served} meanwhile: the agent must send llm.model as the "
                "model of its requests"
            )


@dataclass(frozen=True)
class _InProgress:
    step: int
    pinned: PinnedAdapter
    measuring: asyncio.Task[Metrics]


class PinnedEvaluation:
    """At most one evaluation during training.

    Its rollouts are a task. Its end, which may need the learners, is a part of the loop, and can be repeated
    after these were lost.
    """

    def __init__(self, evaluator: Evaluator, publications: Publications, report: Report) -> None:
        self._evaluator, self._publications, self._report = evaluator, publications, report
        self._current: _InProgress | None = None

    @property
    def step(self) -> int | None:
        """Step that is evaluated, or None."""
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
        """Begin the evaluation of a step whose weights are published. No other one may be in progress.

        Raises:
            WeightSyncError: the engines cannot keep the version.
        """
        assert self._current is None
        pinned = await self._publications.pin(step)
        measuring = asyncio.create_task(self._evaluator.measure(step, pinned))
        self._current = _InProgress(step, pinned, measuring)

    async def end(self, logged: int) -> None:
        """Wait for the rollouts in progress, if any; save the version if it is the best, and log the metrics
        in their own row.

        Args:
            logged: last step that is logged; the row comes after it.

        Raises:
            ConfigError, RaylightError: see `Evaluator.measure` and `Evaluator.compare`.
        """
        if (current := self._current) is None:
            return
        metrics = await asyncio.shield(current.measuring)
        await self._evaluator.compare(current.step, metrics, current.pinned)
        await self._publications.release(current.pinned)
        self._report.evaluation(current.step, logged, metrics)
        self._current = None


def describe_scores(scores: Scores) -> Metrics:
    metrics = {"val/rollouts": float(scores.rollouts), "val/failed": float(scores.failed)}
    if (primary := scores.primary) is not None:
        metrics |= {"val/reward": primary.mean, "val/reward_std": primary.std}
        if primary.error is not None:
            metrics["val/reward_error"] = primary.error
    metrics |= {f"val/reward/{name}": spread.mean for name, spread in scores.others.items()}
    if scores.best_of and (k := max(scores.best_of)) > 1:
        metrics |= {"val/best_of_k": scores.best_of[k], "val/pass_at_k": scores.pass_at[k]}
    if scores.calls:
        metrics["val/response_tokens"] = scores.tokens / scores.calls
    return metrics
