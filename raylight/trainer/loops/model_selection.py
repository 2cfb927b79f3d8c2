"""The best model of a run by a validation metric, and early stopping."""

from __future__ import annotations

import json
from pathlib import Path

from raylight._utils.files import replace_folder, restore_folder, write_atomic
from raylight.algorithms.policy import PolicyAlgorithm
from raylight.algorithms.supervised import SupervisedAlgorithm
from raylight.errors import ConfigError
from raylight.trainer.components.publication import PinnedAdapter
from raylight.trainer.components.run_learner import RunLearner
from raylight.trainer.output.report import Metrics, Report
from raylight.types import JsonObject

BEST_JSON = "best.json"


class ModelSelection:
    """Keeps the best model of a run, and ends training that no longer improves it.

    When the metric `algorithm.best` improves, the model is saved to `best/` in the run directory, together
    with `best.json`. With `algorithm.patience`, `stop_reason` is set after so many evaluations without an
    improvement.

    Args:
        held_out: digest of the data that the model is evaluated on, None without any. Values on different
            data are not compared.
    """

    def __init__(
        self,
        learners: RunLearner,
        algorithm: PolicyAlgorithm | SupervisedAlgorithm,
        report: Report,
        held_out: JsonObject | None,
    ) -> None:
        self._learners, self._report, self._held_out = learners, report, held_out
        self._selection = algorithm
        self._best: JsonObject | None = None
        """Content of `best.json`."""
        self._reference: float | None = None
        """Value that an evaluation must exceed by `min_delta` to count as an improvement."""
        self._stale = 0
        """Number of evaluations since the last improvement."""

    def is_due(self, step: int, is_last: bool) -> bool:
        """Return True if the policy is to be evaluated after a step; step 0 is before the training."""
        algorithm = self._selection
        if self._held_out is None:
            return False
        if step == 0:
            return algorithm.val_before_train
        every = algorithm.val_every
        return every is not None and (is_last or (every > 0 and step % every == 0))

    @property
    def stop_reason(self) -> str | None:
        """Reason to end training early; None to continue."""
        algorithm, best = self._selection, self._best
        if best is None or algorithm.patience is None or self._stale < algorithm.patience:
            return None
        return (
            f"training ends early: {algorithm.best} did not improve by {algorithm.min_delta:g} in the last "
            f"{self._stale} evaluations (patience); its best value is {best['value']:.4g}, at step "
            f"{best['step']}"
        )

    def state_dict(self) -> JsonObject:
        """Return the state that `load_state_dict` takes, as plain JSON."""
        return {"best": self._best, "reference": self._reference, "stale": self._stale}

    def load_state_dict(self, state: JsonObject) -> None:
        """Continue from a state. A model in `best/` that was saved after the state remains the best until a
        better one.

        A best model by another metric or mode, or on other data, is not compared with: the next evaluation
        then counts as the first.
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
        name = self._selection.best
        if name is None or self._selection.val_every is None:  # only the initial model is measured
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
                "mode": self._selection.best_mode,
                "step": step,
                "value": value,
                "metrics": metrics,
                "held_out": self._held_out,
            }
            await self._save(pinned)
            self._report.best = self._best
        if value is not None and (
            self._reference is None
            or self._is_better(value, self._reference, max(self._selection.min_delta, 0.0))
        ):
            self._reference, self._stale = value, 0
        else:
            self._stale += 1

    def _is_comparable(self, best: JsonObject) -> bool:
        """Return True if the best model was chosen by the current metric and mode, on the current data if
        there is any."""
        if self._held_out not in (None, best.get("held_out", self._held_out)):  # older states have none
            return False
        return (best["metric"], best["mode"]) == (self._selection.best, self._selection.best_mode)

    def _is_better(self, value: float, other: float, min_delta: float = 0.0) -> bool:
        gain = value - other if self._selection.best_mode == "max" else other - value
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
