"""What a run leaves to look at: the run directory, and the display while it runs."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import yaml

from raylight.errors import ConfigError
from raylight.experience.batch import BatchReport
from raylight.files import write_atomic
from raylight.types import FinishedRollout

Metrics = dict[str, float]

SHOWN_ERRORS = 10
"""Different errors of rollouts that are shown with their traceback and listed in the summary; all are counted."""


class Display(Protocol):
    """Shows a run while it runs."""

    def stage(self, text: str) -> None:
        """What is going on now."""
        ...

    def step(self, step: int, metrics: Metrics) -> None: ...

    def note(self, text: str) -> None:
        """Something that a person should see."""
        ...


class ProgressReporter:
    """Tells a display what goes on, and counts what failed."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._told: Counter[str] = Counter()
        self._lost = 0

    def stage(self, text: str) -> None:
        self._display.stage(text)

    def note(self, text: str) -> None:
        self._display.note(text)

    def rolling(self, mode: str) -> Callable[[int, int], None]:
        """A progress callback for a batch of rollouts."""
        return lambda done, total: self._display.stage(f"{mode} rollouts {done}/{total}")

    def failures(self, finished: list[FinishedRollout]) -> None:
        """Tell of failed rollouts: the first of each different error with its traceback; all are counted."""
        failed = [
            item.rollout.attempt.failure
            for item in finished
            if item.rollout.attempt and item.rollout.attempt.failure
        ]
        for failure in failed:
            if not self._told[failure.error] and len(self._told) < SHOWN_ERRORS:
                self._display.note(
                    f"a rollout failed ({failure.kind}): {failure.error}\n{failure.trace}".rstrip()
                )
            self._told[failure.error] += 1
        self._lost += sum(failure.kind == "infrastructure" for failure in failed)


class Report(ProgressReporter):
    """Writes the run directory and feeds the display.

    Args:
        folder: `config.yaml`, `metrics.jsonl`, `summary.json`, `reward.png` and `checkpoint/` go here.
        started: `time.perf_counter()` when the run began; now if None.
        after: the step after which a run in this folder goes on; None begins anew.
    """

    def __init__(
        self,
        folder: Path,
        display: Display,
        config: dict[str, Any],
        started: float | None = None,
        after: int | None = None,
    ) -> None:
        super().__init__(display)
        self.folder = folder
        self._started = time.perf_counter() if started is None else started
        self._history: list[Metrics] = []
        self._told_drift = False
        self.best: dict[str, Any] | None = None
        """The best evaluation so far: its metric, mode, step, value and metrics."""
        self._told_mismatch = False
        try:
            self._begin(config, after)
        except OSError as error:
            raise ConfigError(f"output_dir {folder} cannot be written: {error.strerror}") from None

    def _begin(self, config: dict[str, Any], after: int | None) -> None:
        """Make the folder; what an earlier run left there would be taken for this one's, unless this one continues it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if after is None and (self.folder / "config.yaml").exists():
            for name in ("checkpoint", "best", "best.new", "best.old"):
                shutil.rmtree(self.folder / name, ignore_errors=True)
        for name in ("summary.json", "reward.png"):
            (self.folder / name).unlink(missing_ok=True)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
        rows = self.folder / "metrics.jsonl"
        self._history = _rows_until(rows, after) if after is not None and rows.exists() else []
        self._started -= max((row["time/total_s"] for row in self._history), default=0.0)
        write_atomic(rows, "".join(map(_line, self._history)))

    @property
    def checkpoint(self) -> Path:
        return self.folder / "checkpoint"

    def step(self, step: int, metrics: Metrics) -> None:
        """Record one step; step 0 is the validation before training."""
        row = {"step": step, "time/total_s": time.perf_counter() - self._started, **metrics}
        self._history.append(row)
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(_line(row))
        self._display.step(step, row)

    def drift(self, content: BatchReport) -> None:
        """Tell once that calls render their past differently from how it was sampled."""
        drifts = content.drifts_response + content.drifts_ending + content.drifts_header
        if drifts and not self._told_drift:
            self._told_drift = True
            self.note(
                f"{drifts} of {content.calls} calls have a prompt that renders earlier tokens differently from how they were "
                "sampled (trace/drifts_* in metrics.jsonl): each begins a row of its own, so that the past is computed again"
            )

    def mismatch(self, metrics: Metrics) -> None:
        """Tell once that engine and learner compute log-probs further apart than they should, by the metrics of an update."""
        if metrics.get("mismatch/warned") and not self._told_mismatch:
            self._told_mismatch = True
            self.note(
                f"log-probs of engine and learner differ by up to {metrics['mismatch/logprob_abs_max']:.2g} for the same weights "
                "(mismatch/* in metrics.jsonl): does the agent sample with top_p, top_k or a grammar, or do the two compute in "
                "different precision? rollout_is or rollout_rs correct for it; warn_logprob_mismatch sets where this is said"
            )

    def finish(self, counts: dict[str, int]) -> dict[str, Any]:
        """Write the summary and the plot; returns the summary.

        Args:
            counts: of the store, and of lost runners.
        """
        validated = any("val/reward" in row for row in self._history if row["step"] == 0)
        trained = any("train/reward" in row for row in self._history)
        key = "val/reward" if validated or not trained else "train/reward"  # what was measured from the start
        rewards = [row[key] for row in self._history if key in row]
        if not self.checkpoint.exists():
            self.note(
                f"{self.checkpoint} is on the machine of the first learner; use an output_dir on shared storage"
            )
        summary = {
            "reward": key,
            "reward_before": rewards[0] if rewards else None,
            "reward_after": rewards[-1] if rewards else None,
            "steps": int(max((row["step"] for row in self._history), default=0)),
            "seconds": round(time.perf_counter() - self._started, 2),
            "rollouts": counts.get("total_rollouts", 0),
            "rollouts_lost": self._lost,
            "failures": dict(self._told.most_common(SHOWN_ERRORS)),
            "rollouts_failed": self._told.total(),
            "checkpoint": str(self.checkpoint),
            "best": self.best and {key: self.best[key] for key in ("metric", "step", "value")},
            "counts": counts,
        }
        self._write(summary)
        from raylight.trainer.plot import plot_rewards

        plot_rewards(self._history, self.folder / "reward.png", self.best)
        return summary

    def finish_plain(self, counts: dict[str, int]) -> dict[str, Any]:
        """Write the summary of a run whose algorithm brings its own loop; returns it."""
        by_status = {
            name.removeprefix("rollouts_"): counts[name]
            for name in sorted(counts)
            if name.startswith("rollouts_")
        }
        summary = {
            "rollouts": counts.get("total_rollouts", 0),
            "by_status": by_status,
            "seconds": round(time.perf_counter() - self._started, 2),
            "counts": counts,
        }
        self._write(summary)
        return summary

    def _write(self, summary: dict[str, Any]) -> None:
        write_atomic(self.folder / "summary.json", json.dumps(summary, indent=2) + "\n")


def _rows_until(file: Path, step: int) -> list[Metrics]:
    """Rows up to a step; the last line may have been cut off when the run was killed."""
    lines = file.read_text().split("\n")[:-1]
    rows = [
        {key: math.nan if value is None else value for key, value in json.loads(line).items()}
        for line in lines
    ]
    return [row for row in rows if row["step"] <= step]


def _line(row: Metrics) -> str:
    return (
        json.dumps({key: value if math.isfinite(value) else None for key, value in row.items()}) + "\n"
    )  # JSON has no NaN
