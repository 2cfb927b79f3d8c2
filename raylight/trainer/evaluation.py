"""How good the policy is on tasks that it is never trained on: measured along the way, the best one kept, a stop where it gets no
better."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Protocol

from raylight.algorithms.policy import PolicyAlgorithm
from raylight.errors import ConfigError
from raylight.files import replace_folder, restore_folder, write_atomic
from raylight.trainer.outcome import raise_if_hopeless
from raylight.trainer.report import Metrics, Report
from raylight.trainer.scores import Scores, measure
from raylight.types import FinishedRollout

BEST_JSON = "best.json"


class Saves(Protocol):
    """Learners."""

    async def save(self, folder: str) -> None: ...


class RollsOut(Protocol):
    """A session, as far as an evaluation needs it."""

    @property
    def learners(self) -> Saves: ...

    async def rollout(
        self, tasks: list[Any], mode: Any, samples: int, progress: Any
    ) -> list[FinishedRollout]: ...


class Evaluator:
    """Measures the policy on validation tasks before, during and after training.

    Whenever the metric `algorithm.best` gets better, the model is saved to `best/` in the run directory, with `best.json` in it.
    With `algorithm.patience`, `stop_reason` says when it got no better for so many evaluations.

    Args:
        tasks: none, and nothing is ever measured.
    """

    def __init__(
        self, session: RollsOut, algorithm: PolicyAlgorithm, tasks: list[Any], report: Report
    ) -> None:
        self._session = session
        self._algorithm = algorithm
        self._tasks = tasks
        self._report = report
        self._best: dict[str, Any] | None = None
        """The content of `best.json`."""
        self._reference: float | None = None
        """The value that the next ones are to surpass by `min_delta`."""
        self._stale = 0
        """Evaluations since then."""

    async def before_training(self) -> Metrics:
        """The metrics of the model as it comes; nothing where these are not wanted."""
        return await self._evaluate(0) if self._tasks and self._algorithm.val_before_train else {}

    async def after(self, step: int, last: bool) -> Metrics:
        """The metrics after a step; nothing where no evaluation is due.

        Raises:
            ConfigError: the metric that tells the best is not among them.
            RaylightError: no rollout was scored (see `raise_if_hopeless`).
        """
        every = self._algorithm.val_every
        if not self._tasks or every is None:
            return {}
        return await self._evaluate(step) if last or (every and step % every == 0) else {}

    @property
    def stop_reason(self) -> str | None:
        """Why training should end now; None if it should go on."""
        algorithm = self._algorithm
        if algorithm.patience is None or self._stale < algorithm.patience:
            return None
        assert self._best is not None
        return (
            f"{algorithm.best} did not get better by {algorithm.min_delta:g} in {self._stale} evaluations, so training ends early "
            f"(patience); its best is {self._best['value']:.4g}, of step {self._best['step']}"
        )

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` takes; plain JSON."""
        return {"best": self._best, "reference": self._reference, "stale": self._stale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state. A model in `best/` that was saved after it stays the best, as long as none is better.

        What was the best by another metric, or the other way round, is not compared with: the next evaluation is the first.
        """
        self._best, self._reference, self._stale = state["best"], state["reference"], state["stale"]
        if self._best is not None and not self._tells(self._best):
            self._best, self._reference, self._stale = None, None, 0
        kept = self.folder / BEST_JSON
        restore_folder(self.folder)
        if kept.exists():
            there = json.loads(kept.read_text())
            if self._tells(there) and (
                self._best is None or self._is_better(there["value"], self._best["value"])
            ):
                self._best = there
        self._report.best = self._best

    @property
    def folder(self) -> Path:
        """Where the best model is."""
        return self._report.folder / "best"

    async def _evaluate(self, step: int) -> Metrics:
        started = time.perf_counter()
        algorithm, report = self._algorithm, self._report
        finished = await self._session.rollout(
            self._tasks, "val", algorithm.val_samples, report.rolling("val")
        )
        report.failures(finished)
        raise_if_hopeless(finished, algorithm.failure_reward)
        metrics = describe_scores(
            measure(finished, algorithm.val_samples, algorithm.failure_reward, algorithm.pass_reward)
        )
        metrics["time/val_s"] = time.perf_counter() - started
        if (
            algorithm.best is not None and algorithm.val_every is not None
        ):  # else the untrained model would be the best
            await self._compare(step, algorithm.best, metrics)
        return metrics

    async def _compare(self, step: int, name: str, metrics: Metrics) -> None:
        """Note whether the policy got better, and keep it if it did."""
        value = metrics.get(name)
        if value is None and self._best is None:
            known = ", ".join(key for key in metrics if key.startswith("val/"))
            raise ConfigError(f"best={name!r} is not among the metrics of this evaluation: {known}")
        if value is not None and (self._best is None or self._is_better(value, self._best["value"])):
            self._best = {
                "metric": name,
                "mode": self._algorithm.best_mode,
                "step": step,
                "value": value,
                "metrics": metrics,
            }
            await self._save()
            self._report.best = self._best
        if value is not None and (
            self._reference is None
            or self._is_better(value, self._reference, max(self._algorithm.min_delta, 0.0))
        ):
            self._reference, self._stale = value, 0
        else:
            self._stale += 1

    def _tells(self, best: dict[str, Any]) -> bool:
        """Whether what was found the best was so by the metric that counts now."""
        return (best["metric"], best["mode"]) == (self._algorithm.best, self._algorithm.best_mode)

    def _is_better(self, value: float, other: float, by: float = 0.0) -> bool:
        gain = value - other if self._algorithm.best_mode == "max" else other - value
        return gain > 0 and gain >= by

    async def _save(self) -> None:
        """Write the policy and what it is worth to `best/`, which holds either the former best or the new one, whole."""
        new = self.folder.with_name(f"{self.folder.name}.new")
        await self._session.learners.save(str(new))
        if not new.is_dir():
            self._report.note(
                f"{new} is on the machine of the first learner; use an output_dir on shared storage"
            )
            return
        write_atomic(new / BEST_JSON, json.dumps(self._best, indent=2) + "\n")
        replace_folder(new, self.folder)


def describe_scores(scores: Scores) -> Metrics:
    """Scores as metrics of a step."""
    metrics = {"val/rollouts": float(scores.rollouts), "val/failed": float(scores.failed)}
    for name, found in scores.rewards.items():
        metrics["val/reward" if name == "reward" else f"val/reward/{name}"] = found.mean
    if (primary := scores.rewards.get("reward")) is not None:
        metrics["val/reward_std"] = primary.std
        if primary.error is not None:
            metrics["val/reward_error"] = primary.error
    if scores.best_of and (k := max(scores.best_of)) > 1:
        metrics |= {"val/best_of_k": scores.best_of[k], "val/pass_at_k": scores.pass_at[k]}
    if scores.calls:
        metrics["val/response_tokens"] = scores.tokens / scores.calls
    return metrics
