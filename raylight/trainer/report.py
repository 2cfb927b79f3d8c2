"""The output of a run: its directory, its metric loggers, and what its display shows."""

from __future__ import annotations

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import yaml

from raylight.errors import ConfigError
from raylight.experience.batch import BatchReport
from raylight.files import write_atomic
from raylight.trainer.drift_log import DriftLog
from raylight.trainer.loggers import (
    PLOT_FILE,
    VAL_STEP,
    Display,
    LoggerGroup,
    Metrics,
    evaluated_step,
    find_loggers,
    read_history,
)
from raylight.types import FinishedRollout

MAX_SHOWN_ERRORS = 10
"""Number of distinct rollout errors that are shown with a traceback and listed in the summary."""
MAX_COUNTED_ERRORS = 1_000
"""Number of distinct rollout errors that are counted one by one."""
SUMMARISED = (
    "step",
    VAL_STEP,
    "val/reward",
    "train/reward",
    "off_policy/calls",
    "off_policy/overridden_calls",
)
"""Metrics of each step that the summary is made of."""


class ProgressReporter:
    """Shows progress on a display, and counts failed rollouts."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._failures: Counter[str] = Counter()
        self._failed = self._lost = 0

    def stage(self, text: str) -> None:
        """Show what the run is doing now."""
        self._display.stage(text)

    def note(self, text: str) -> None:
        """Show a message that stays."""
        self._display.note(text)

    def rollout_progress(self, mode: str) -> Callable[[int, int], None]:
        """Return a progress callback for a batch of rollouts."""
        return lambda done, total: self._display.progress(f"{mode} rollouts {done}/{total}")

    def failures(self, finished: list[FinishedRollout]) -> None:
        """Count failed rollouts, and show the first one of each distinct error with its traceback."""
        failed = [item.rollout.failure for item in finished if item.rollout.failure]
        for failure in failed:
            if failure.error not in self._failures and len(self._failures) < MAX_SHOWN_ERRORS:
                self._display.note(
                    f"a rollout failed ({failure.kind}): {failure.error}\n{failure.trace}".rstrip()
                )
            if failure.error in self._failures or len(self._failures) < MAX_COUNTED_ERRORS:
                self._failures[failure.error] += 1
        self._failed += len(failed)
        self._lost += sum(failure.kind == "infrastructure" for failure in failed)


class Report(ProgressReporter):
    """Writes the run directory, and feeds the metric loggers and the display.

    Args:
        folder: the run directory: `config.yaml`, `summary.json`, `checkpoint/`, and the files of the loggers.
        config: content of `config.yaml`.
        started: `time.perf_counter()` at the start of the run; now if None.
        last_logged_step: last step whose metrics are kept by a resumed run; None starts with an empty
            directory.
        loggers: as for `Trainer(loggers=...)`.

    Raises:
        ConfigError: the folder cannot be written, or a logger cannot be constructed.
    """

    def __init__(
        self,
        folder: Path,
        display: Display,
        config: dict[str, Any],
        started: float | None = None,
        last_logged_step: int | None = None,
        loggers: Iterable[Any] | None = None,
    ) -> None:
        super().__init__(display)
        self.folder = folder
        self._started = time.perf_counter() if started is None else started
        self._drifts = DriftLog()
        self._reported_mismatch = self._reported_stale = False
        self._reported_off_policy = self._reported_seeds = False
        self.best: dict[str, Any] | None = None
        """The best evaluation so far: its metric, mode, step, value and metrics."""
        try:
            self._prepare_folder(config, fresh=last_logged_step is None)
            history = read_history(folder, last_logged_step)
        except OSError as error:
            raise ConfigError(
                f"output_dir {folder} cannot be written: {error.strerror}; choose another folder"
            ) from None
        self._history: list[Metrics] = []
        """Columns `SUMMARISED` of all steps."""
        self._tokens: dict[str, int] = {}
        """The ledger after the last step."""
        # those beside training that ended before a resume, by step
        self._evaluations = {row[VAL_STEP]: row for row in history if VAL_STEP in row}
        for row in history:
            self._keep(row)
        self._started -= max((row["time/total_s"] for row in history), default=0.0)
        self._loggers = LoggerGroup(find_loggers(loggers), folder, display, tuple(history))
        self._loggers.start(config)

    def _prepare_folder(self, config: dict[str, Any], fresh: bool) -> None:
        """Create the folder and remove results of an earlier run in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if fresh and (self.folder / "config.yaml").exists():
            for name in ("checkpoint", "best", "best.new", "best.old"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in ("summary.json", PLOT_FILE):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))

    @property
    def checkpoint(self) -> Path:
        """Folder of the trained model."""
        return self.folder / "checkpoint"

    def step(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step; step 0 is the evaluation before training."""
        timed = {"time/total_s": time.perf_counter() - self._started, **metrics}
        self._keep({"step": step, **timed})
        self._loggers.log(step, timed)

    def _keep(self, row: Metrics) -> None:
        """Keep of a step what the summary needs: all metrics would take megabytes in a long run."""
        self._history.append({name: row[name] for name in SUMMARISED if name in row})
        if "ledger/generated" in row:
            self._tokens = {
                name.removeprefix("ledger/"): int(n) for name, n in row.items() if name.startswith("ledger/")
            }

    def evaluation(self, step: int, logged: int, metrics: Metrics) -> None:
        """Log the metrics of an evaluation beside training, in a row of its own.

        Args:
            step: the step that was evaluated.
            logged: the last step that is logged, which the row is added to.
        """
        self.step(logged, {VAL_STEP: float(step)} | metrics)

    def evaluation_of(self, step: int) -> Metrics | None:
        """Return the metrics of an evaluation beside training that ended before a resume; None if it did
        not."""
        return self._evaluations.get(step)

    def batch(self, content: BatchReport) -> None:
        """Count calls that do not continue the tokens of their conversations, and show the first ones. Show
        the first calls that are masked because they were sampled off-policy."""
        if note := self._drifts.add(content.relations):
            self.note(note)
        if content.repeated_seeds and not self._reported_seeds:
            self._reported_seeds = True
            self.note(
                f"{content.repeated_seeds} rollouts sampled with the seed of another rollout of their group, "
                "so that their responses are equal where their prompts are (off_policy/repeated_seeds in "
                "metrics.jsonl): remove `seed` from the agent's requests, or set override_sampling=True"
            )
        if content.off_policy_calls and not self._reported_off_policy:
            self._reported_off_policy = True
            self.note(
                f"{content.off_policy_calls} calls are left out of the loss, because they were not sampled "
                f"from the policy's own distribution (off_policy/* in metrics.jsonl): {content.off_policy}. "
                "override_sampling=True lets raylight set the sampling of training rollouts"
            )

    def mismatch(self, metrics: Metrics) -> None:
        """Show once that the log-probs of engine and learner differ by more than `warn_logprob_mismatch`, and
        once that all tokens of a batch are of older weights.

        Args:
            metrics: of a step with an update.
        """
        is_synchronous = "async/staleness_max" not in metrics
        if is_synchronous and metrics.get("mismatch/stale_fraction") == 1 and not self._reported_stale:
            self._reported_stale = True
            self.note(
                "no token of the batch was sampled with the current weights (mismatch/stale_fraction in "
                "metrics.jsonl); if that stays so, check that the engines load new weights"
            )
        if metrics.get("mismatch/warned") and not self._reported_mismatch:
            self._reported_mismatch = True
            self.note(
                f"log-probs of engine and learner differ by {metrics['mismatch/logprob_abs_mean']:.2g} on "
                f"average and by up to {metrics['mismatch/logprob_abs_max']:.2g} for the same weights "
                "(mismatch/* in metrics.jsonl): they compute the model differently, for example in other "
                "precision. rollout_is or rollout_rs correct for it; warn_logprob_mismatch sets the "
                "threshold of this note"
            )

    def finish(self, counts: dict[str, int]) -> dict[str, Any]:
        """Write the summary of a run that trains a model, and finish the loggers; return the summary.

        Args:
            counts: counters of the store and of the runner pool.
        """
        validated = any("val/reward" in row and evaluated_step(row) == 0 for row in self._history)
        trained = any("train/reward" in row for row in self._history)
        key = "val/reward" if validated or not trained else "train/reward"  # measured from the start
        rewards = [row[key] for row in self._history if key in row]
        if not self.checkpoint.exists():
            self.note(
                f"{self.checkpoint} is on the machine of the first learner; use an output_dir on shared "
                "storage"
            )
        if advice := self._drifts.advice():
            self.note(advice)
        return self._write_summary(
            {
                "reward": key,
                "reward_before": rewards[0] if rewards else None,
                "reward_after": rewards[-1] if rewards else None,
                "steps": int(max((row["step"] for row in self._history), default=0)),
                "seconds": self._seconds(),
                "rollouts": counts.get("total_rollouts", 0),
                "rollouts_lost": self._lost,
                "failures": dict(self._failures.most_common(MAX_SHOWN_ERRORS)),
                "rollouts_failed": self._failed,
                "drifts": self._drifts.summary(),
                "masked_calls": self._total("off_policy/calls"),
                "overridden_calls": self._total("off_policy/overridden_calls"),
                "tokens": self._tokens,
                "checkpoint": str(self.checkpoint),
                "best": self.best and {name: self.best[name] for name in ("metric", "step", "value")},
                "counts": counts,
            }
        )

    def finish_plain(self, counts: dict[str, int]) -> dict[str, Any]:
        """Write the summary of a run that trains no model, and finish the loggers; return the summary."""
        by_status = {
            name.removeprefix("rollouts_"): counts[name]
            for name in sorted(counts)
            if name.startswith("rollouts_")
        }
        return self._write_summary(
            {
                "rollouts": counts.get("total_rollouts", 0),
                "by_status": by_status,
                "seconds": self._seconds(),
                "counts": counts,
            }
        )

    def close(self) -> None:
        """Finish the loggers, after a success or an error."""
        self._loggers.finish()

    def _total(self, metric: str) -> int:
        """Return the sum of a count over all steps."""
        return int(sum(row.get(metric, 0.0) for row in self._history))

    def _seconds(self) -> float:
        return round(time.perf_counter() - self._started, 2)

    def _write_summary(self, summary: dict[str, Any]) -> dict[str, Any]:
        write_atomic(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        self.close()
        return summary
