"""Evaluation of the policy on tasks that it is never trained on: metrics, the best model, and early
stopping."""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any, Protocol

from raylight.algorithms.policy import PolicyAlgorithm
from raylight.errors import ConfigError
from raylight.files import replace_folder, restore_folder, write_atomic
from raylight.trainer.outcome import by_source, raise_if_hopeless
from raylight.trainer.report import Metrics, Report
from raylight.trainer.sampled_rollouts import example_ids, sampled_rollout
from raylight.trainer.scores import Scores, measure
from raylight.trainer.served_adapter import PinnedAdapter
from raylight.trainer.settings import MODEL_NAME
from raylight.types import FinishedRollout

BEST_JSON = "best.json"


class ModelSaver(Protocol):
    """The part of the learners that an Evaluator uses."""

    async def save(self, folder: str, pinned: PinnedAdapter | None = None) -> None:
        """Write the model, or a pinned version of it, to a folder."""
        ...


class EvaluationRollouts(Protocol):
    """The part of PolicyRollouts that an Evaluator uses."""

    async def evaluate(
        self, step: int, tasks: list[Any], samples: int, progress: Any, model: str | None = None
    ) -> list[FinishedRollout]:
        """Roll every task out `samples` times after a step, with the model of this name."""
        ...

    async def with_spans(self, ids: list[str]) -> list[FinishedRollout]:
        """Return finished rollouts with their spans."""
        ...


class Evaluator:
    """Evaluates the policy on validation tasks before, during and after training.

    When the metric `algorithm.best` improves, the model is saved to `best/` in the run directory, together
    with `best.json`. With `algorithm.patience`, `stop_reason` is set after so many evaluations without an
    improvement.

    Args:
        tasks: validation tasks; without any, nothing is evaluated.
    """

    def __init__(
        self,
        rollouts: EvaluationRollouts,
        learners: ModelSaver,
        algorithm: PolicyAlgorithm,
        tasks: list[Any],
        report: Report,
    ) -> None:
        self._rollouts, self._learners = rollouts, learners
        self._algorithm = algorithm
        self._tasks = tasks
        self._report = report
        self._best: dict[str, Any] | None = None
        """Content of `best.json`."""
        self._reference: float | None = None
        """Value that an evaluation must exceed by `min_delta` to count as an improvement."""
        self._stale = 0
        """Number of evaluations since the last improvement."""
        self._reported_others = False

    def is_due(self, step: int, is_last: bool) -> bool:
        """Return True if the policy is to be evaluated after a step; step 0 is before the training."""
        algorithm = self._algorithm
        if not self._tasks:
            return False
        if step == 0:
            return algorithm.val_before_train
        every = algorithm.val_every
        return every is not None and (is_last or (every > 0 and step % every == 0))

    @property
    def stop_reason(self) -> str | None:
        """Reason to end training early; None to continue."""
        algorithm = self._algorithm
        if algorithm.patience is None or self._stale < algorithm.patience:
            return None
        assert self._best is not None
        return (
            f"training ends early: {algorithm.best} did not improve by {algorithm.min_delta:g} in the last "
            f"{self._stale} evaluations (patience); its best value is {self._best['value']:.4g}, at step "
            f"{self._best['step']}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `load_state_dict` takes, as plain JSON."""
        return {"best": self._best, "reference": self._reference, "stale": self._stale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state. A model in `best/` that was saved after the state remains the best until a
        better one.

        A best model by another metric or mode is not compared with: the next evaluation then counts as the
        first.
        """
        self._best, self._reference, self._stale = state["best"], state["reference"], state["stale"]
        if self._best is not None and not self._is_comparable(self._best):
            self._best, self._reference, self._stale = None, None, 0
        restore_folder(self.folder)
        best_json = self.folder / BEST_JSON
        if best_json.exists():
            saved = json.loads(best_json.read_text())
            if self._is_comparable(saved) and (
                self._best is None or self._is_better(saved["value"], self._best["value"])
            ):
                self._best = saved
        self._report.best = self._best

    @property
    def folder(self) -> Path:
        """Folder of the best model."""
        return self._report.folder / "best"

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
            pinned.name if pinned else None,
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
        for source, values in by_source(finished, algorithm.failure_reward).items():
            metrics[f"val/source/{source}/reward"] = statistics.fmean(values)
        metrics["time/val_s"] = time.perf_counter() - started
        return metrics

    def _check_versions(self, finished: list[FinishedRollout], pinned: PinnedAdapter) -> None:
        """Show once that calls were not sampled from the pinned version."""
        calls = [call for item in finished for call in item.generations if call.model == MODEL_NAME]
        others = sum(bool((call.weight_versions != pinned.version).any()) for call in calls)
        if others and not self._reported_others:
            self._reported_others = True
            self._report.note(
                f"{others} of {len(calls)} calls of the evaluation were not sampled from the weights of its "
                f"step, which the engines serve as {pinned.name!r} meanwhile: the agent must send llm.model "
                "as the model of its requests"
            )

    async def compare(
        self, step: int, metrics: Metrics, pinned: PinnedAdapter | None = None, saves: bool = True
    ) -> None:
        """Compare the policy after a step with the best so far; save it if it is better.

        Args:
            metrics: result of `measure`.
            pinned: the version after the step; None if the learners hold it.
            saves: False if no one holds it any more.

        Raises:
            ConfigError: the metric `algorithm.best` is not among the metrics.
        """
        name = self._algorithm.best
        if name is None or self._algorithm.val_every is None:  # only the initial model is measured
            return
        value = metrics.get(name)
        if value is None and self._best is None:
            available = ", ".join(key for key in metrics if key.startswith("val/"))
            raise ConfigError(
                f"best={name!r} is not a metric of this evaluation; set best to one of: {available}"
            )
        is_best = value is not None and (self._best is None or self._is_better(value, self._best["value"]))
        if is_best and saves:
            self._best = {
                "metric": name,
                "mode": self._algorithm.best_mode,
                "step": step,
                "value": value,
                "metrics": metrics,
            }
            await self._save(pinned)
            self._report.best = self._best
        if value is not None and (
            self._reference is None
            or self._is_better(value, self._reference, max(self._algorithm.min_delta, 0.0))
        ):
            self._reference, self._stale = value, 0
        else:
            self._stale += 1

    def _is_comparable(self, best: dict[str, Any]) -> bool:
        """Return True if the best model was chosen by the current metric and mode."""
        return (best["metric"], best["mode"]) == (self._algorithm.best, self._algorithm.best_mode)

    def _is_better(self, value: float, other: float, min_delta: float = 0.0) -> bool:
        gain = value - other if self._algorithm.best_mode == "max" else other - value
        return gain > 0 and gain >= min_delta

    async def _save(self, pinned: PinnedAdapter | None) -> None:
        """Replace `best/` by the policy and its `best.json`, atomically."""
        new = self.folder.with_name(f"{self.folder.name}.new")
        await self._learners.save(str(new), pinned)
        if not new.is_dir():
            self._report.note(
                f"{new} is on the machine of the first learner; use an output_dir on shared storage"
            )
            return
        write_atomic(new / BEST_JSON, json.dumps(self._best, indent=2) + "\n")
        replace_folder(new, self.folder)


def describe_scores(scores: Scores) -> Metrics:
    """Return scores as metrics of a step."""
    metrics = {"val/rollouts": float(scores.rollouts), "val/failed": float(scores.failed)}
    for name, spread in scores.rewards.items():
        metrics["val/reward" if name == "reward" else f"val/reward/{name}"] = spread.mean
    if (primary := scores.rewards.get("reward")) is not None:
        metrics["val/reward_std"] = primary.std
        if primary.error is not None:
            metrics["val/reward_error"] = primary.error
    if scores.best_of and (k := max(scores.best_of)) > 1:
        metrics |= {"val/best_of_k": scores.best_of[k], "val/pass_at_k": scores.pass_at[k]}
    if scores.calls:
        metrics["val/response_tokens"] = scores.tokens / scores.calls
    return metrics
