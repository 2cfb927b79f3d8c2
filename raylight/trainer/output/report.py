"""The output of a run: its directory, its metric loggers, and what its display shows."""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml

from raylight._utils.files import write_atomic
from raylight.advisories import Advisor
from raylight.errors import ConfigError, summarize_ray_error
from raylight.experience.batches.batch import BatchReport
from raylight.experience.batches.token_records import TOKENS_FOLDER, RowRecord, TokenRecords
from raylight.trainer.output.drift_log import DriftLog
from raylight.trainer.output.loggers import Display, Metrics, SampledRollout
from raylight.trainer.output.loggers.group import LoggerGroup
from raylight.trainer.output.loggers.protocol import VAL_STEP, evaluated_step
from raylight.trainer.output.loggers.registry import find_loggers
from raylight.trainer.output.loggers.run_files import PLOT_FILE, read_history
from raylight.trainer.output.loggers.tracker import TRACKER_FOLDER
from raylight.types import FinishedRollout, JsonObject

MAX_SHOWN_ERRORS = 10
"""Number of distinct rollout errors that are shown with a traceback and listed in the summary."""
MAX_COUNTED_ERRORS = 1_000
"""Number of distinct rollout errors that are counted one by one."""
SUMMARISED = (
    "step",
    VAL_STEP,
    "val/reward",
    "val/rollouts",
    "val/failed",
    "train/reward",
    "val/loss",
    "train/loss",
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
        return functools.partial(self._display.progress, f"{mode} rollouts")

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Show that a phase of a step is in progress during the block."""
        self._display.progress(name, 0, 1)
        try:
            yield
        finally:
            self._display.progress(name, 1, 1)

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
        config: JsonObject,
        started: float | None = None,
        last_logged_step: int | None = None,
        loggers: Iterable[object] | None = None,
    ) -> None:
        super().__init__(display)
        self.folder = folder
        self._started = time.perf_counter() if started is None else started
        self._drifts = DriftLog()
        self._details: dict[str, str] = {}
        """Sentences about the calls of the last batch, by the kind of the advisory."""
        self._reported_no_records = False
        self._records = TokenRecords(folder)
        self.best: JsonObject | None = None
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
        self._lengths: dict[str, dict[str, int]] = {}
        """Tokens by the length of their rollout, after the last step."""
        # evaluations during training that ended before a resume, by step
        self._evaluations = {row[VAL_STEP]: row for row in history if VAL_STEP in row}
        self._advisor = Advisor()
        for row in history:
            self._keep(row)
            self._advisor.add(row)
        for advisory in reversed(self._advisor.advisories):  # the most severe one stays in view
            if advisory.is_active:
                display.advise(advisory)
        self._started -= max((row["time/total_s"] for row in history), default=0.0)
        self._loggers = LoggerGroup(find_loggers(loggers), folder, display, tuple(history))
        self._loggers.start(config)

    def _prepare_folder(self, config: JsonObject, fresh: bool) -> None:
        """Create the folder and remove results of an earlier run in it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if fresh and (self.folder / "config.yaml").exists():
            for name in ("checkpoint", "best", "best.new", "best.old", TOKENS_FOLDER, TRACKER_FOLDER):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in ("summary.json", PLOT_FILE):
            (self.folder / name).unlink(missing_ok=True)
        dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # ten times as fast if it is compiled
        write_atomic(self.folder / "config.yaml", yaml.dump(config, Dumper=dumper, sort_keys=False))

    @property
    def checkpoint(self) -> Path:
        """Folder of the trained model."""
        return self.folder / "checkpoint"

    def step(self, step: int, metrics: Metrics) -> None:
        """Log the metrics of a step; step 0 is the evaluation before training."""
        timed = {"time/total_s": time.perf_counter() - self._started, **metrics}
        self._keep({"step": step, **timed})
        self._loggers.log(step, timed)
        for advisory in self._advisor.add({"step": step, **timed}, self._details):
            self._display.advise(advisory)

    @property
    def takes_rollouts(self) -> bool:
        """True if a logger receives rollouts of evaluations."""
        return self._loggers.takes_rollouts

    def rollouts(self, step: int, table: list[SampledRollout]) -> None:
        """Give a few rollouts of the evaluation of a step to the loggers that receive them."""
        self._loggers.rollouts(step, table)

    def _keep(self, row: Metrics) -> None:
        """Keep of a step what the summary needs: all metrics would take megabytes in a long run."""
        self._history.append({name: row[name] for name in SUMMARISED if name in row})
        if "ledger/generated" in row:
            self._tokens, self._lengths = {}, {}
            for kind, _, name in (metric.partition("/") for metric in row):
                if kind == "ledger":
                    self._tokens[name] = int(row[f"ledger/{name}"])
                elif kind == "lengths":
                    bound, _, fate = name.partition("/")
                    self._lengths.setdefault(bound, {})[fate] = int(row[f"lengths/{name}"])

    def evaluation(self, step: int, logged: int, metrics: Metrics) -> None:
        """Log the metrics of an evaluation during training, in a separate row.

        Args:
            step: the step that was evaluated.
            logged: the last step that is logged, which the row is added to.
        """
        self.step(logged, {VAL_STEP: float(step)} | metrics)

    def evaluation_of(self, step: int) -> Metrics | None:
        """Return the metrics of an evaluation during training that ended before a resume; None if it did
        not."""
        return self._evaluations.get(step)

    def batch(self, content: BatchReport) -> None:
        """Keep the first calls that an advisory may name: those that do not continue the tokens of
        their conversations, and those that are masked because they were sampled off-policy."""
        self._drifts.add(content.relations)
        self._details = {
            "drifts": self._drifts.detail(),
            "off_policy_calls": f"Most often {content.off_policy}",
        }

    def row_records(self, step: int, records: list[RowRecord], rollout_ids: list[str]) -> None:
        """Write what a step computed of its rows. A failure is shown once, and the run continues.

        Args:
            rollout_ids: rollout of each row of the batch.
        """
        try:
            self._records.write(step, records, rollout_ids)
        except OSError as error:
            if not self._reported_no_records:
                self._reported_no_records = True
                self.note(
                    f"the log-probs and advantages of step {step} cannot be written, and the run continues "
                    f"without them: {error}"
                )

    def finish(self, counts: dict[str, int]) -> JsonObject:
        """Write the summary of a run that trains a model, and finish the loggers; return the summary.

        Args:
            counts: counters of the store and of the runner pool.
        """
        validated = any("val/reward" in row and evaluated_step(row) == 0 for row in self._history)
        trained = any("train/reward" in row for row in self._history)
        key = "val/reward" if validated or not trained else "train/reward"  # measured from the start
        return self._write_summary(
            self._describe_training("reward", key, counts)
            | {
                "rollouts": counts.get("total_rollouts", 0),
                "rollouts_lost": self._lost,
                "failures": dict(self._failures.most_common(MAX_SHOWN_ERRORS)),
                "rollouts_failed": self._failed,
                "val_failed_share": self._val_failed_share(),
                "drifts": self._drifts.summary(),
                "masked_calls": self._total("off_policy/calls"),
                "overridden_calls": self._total("off_policy/overridden_calls"),
                "tokens": self._tokens,
                "tokens_by_length": self._lengths,
            }
        )

    def _val_failed_share(self) -> float | None:
        """Return the share of the last evaluation's rollouts that failed; None without an evaluation."""
        rows = [row for row in self._history if row.get("val/rollouts")]
        return rows[-1]["val/failed"] / rows[-1]["val/rollouts"] if rows else None

    def finish_supervised(self, counts: dict[str, int]) -> JsonObject:
        """Write the summary of a run that trains a model on given examples, and finish the loggers; return
        the summary."""
        validated = any("val/loss" in row for row in self._history)
        key = "val/loss" if validated else "train/loss"
        return self._write_summary(self._describe_training("loss", key, counts))

    def _describe_training(self, name: str, key: str, counts: dict[str, int]) -> JsonObject:
        """Return what the summaries of all runs that train a model have.

        Args:
            name: of the figure that the training improves.
            key: its metric.
        """
        values = [row[key] for row in self._history if key in row]
        if not self.checkpoint.exists():
            self.note(
                f"{self.checkpoint} is on the machine of the first learner; use an output_dir on shared "
                "storage"
            )
        return {
            name: key,
            f"{name}_before": values[0] if values else None,
            f"{name}_after": values[-1] if values else None,
            "steps": int(max((row["step"] for row in self._history), default=0)),
            "seconds": self._seconds(),
            "advisories": [advisory.to_json() for advisory in self._advisor.advisories],
            "checkpoint": str(self.checkpoint),
            "best": self.best and {name: self.best[name] for name in ("metric", "step", "value")},
            "counts": counts,
        }

    def finish_plain(self, counts: dict[str, int]) -> JsonObject:
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

    def close(self, failure: str | None = None) -> None:
        """Finish the loggers, after a success or an error.

        Args:
            failure: reason why the run ended with an error.
        """
        self._loggers.finish(failure)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(None if error is None else summarize_ray_error(error))

    def _total(self, metric: str) -> int:
        """Return the sum of a count over all steps."""
        return int(sum(row.get(metric, 0.0) for row in self._history))

    def _seconds(self) -> float:
        return round(time.perf_counter() - self._started, 2)

    def _write_summary(self, summary: JsonObject) -> JsonObject:
        write_atomic(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")
        self.close()
        return summary
