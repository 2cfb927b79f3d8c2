"""The view of a run's progress: the last steps, the reward, what the run does now, and the last advisory."""

from __future__ import annotations

import math

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from raylight._utils.printable import printable
from raylight.advisories import Advisory
from raylight.trainer.output.displays.progress import RunProgress, StepPhase, format_seconds
from raylight.trainer.output.loggers.protocol import VAL_STEP, Metrics

Column = tuple[str, str, str]
"""Title, metric and format."""

COLUMNS: list[Column] = [
    ("reward", "train/reward", "{:.3f}"),
    ("validation", "val/reward", "{:.3f}"),
    ("tokens/s", "train/tokens_per_s", "{:.0f}"),
    ("failed", "train/failed", "{:.0f}"),
    ("tokens/answer", "train/response_tokens", "{:.1f}"),
    ("rollout s", "time/rollout_s", "{:.2f}"),
    ("update s", "time/update_s", "{:.2f}"),
    ("sync s", "time/sync_s", "{:.3f}"),
]
"""Columns in the order in which a narrow view keeps them."""
SUPERVISED_COLUMNS: list[Column] = [
    ("loss", "train/loss", "{:.4f}"),
    ("validation", "val/loss", "{:.4f}"),
    ("epoch", "train/epoch", "{:.2f}"),
    ("tokens", "train/learned_tokens", "{:.0f}"),
    ("update s", "time/update_s", "{:.2f}"),
]
"""Columns of training on given examples."""
OVERLAP_COLUMNS: list[Column] = [
    ("staleness", "async/staleness_mean", "{:.2f}"),
    ("oldest", "async/staleness_max", "{:.0f}"),
]
"""Columns of asynchronous training."""
DRIFT_COLUMNS: list[Column] = [
    ("drifts", "trace/drifts", "{:.0f}"),
    ("rows/rollout", "trace/rows_per_rollout", "{:.2f}"),
]
"""Columns that are shown once calls start new rows although they continue a conversation."""
FAILED_COLUMN: Column = ("failed there", "val/failed", "{:.0f}")
"""Column next to the validation reward, once a rollout of it has failed."""
BARS = "▁▂▃▄▅▆▇█"
MAX_WIDTH = 120
LINES_BELOW = 10
"""Lines that a view needs in addition to the table of steps."""
ADVISORY_LINES = 3
LEVEL_STYLE = {"alarm": "bold red", "warning": "yellow", "hint": "cyan"}


def advisory_text(advisory: Advisory) -> Text:
    """Return an advisory with its step, in the colour of its level."""
    text = printable(f"{advisory.level} at step {advisory.first_step}: {advisory}")
    return Text(text, LEVEL_STYLE[advisory.level])


def cell(metrics: Metrics, key: str, form: str) -> str:
    """Return a formatted metric; empty if a step does not have it."""
    return form.format(metrics[key]) if key in metrics else ""


def label(step: int, metrics: Metrics) -> str:
    """Return the name of a row: a step, or the evaluation of one."""
    return f"evaluation of step {metrics[VAL_STEP]:.0f}" if VAL_STEP in metrics else f"step {step}"


def columns_of(rows: list[Metrics]) -> list[Column]:
    """Return the columns that the metrics of some steps need."""
    if any("train/loss" in row or "val/loss" in row for row in rows):
        return list(SUPERVISED_COLUMNS)
    columns = list(COLUMNS)
    if any(row.get("val/failed") for row in rows):
        columns.insert(2, FAILED_COLUMN)
    if any("async/staleness_mean" in row for row in rows):
        columns += OVERLAP_COLUMNS
    if any(row.get("trace/drifts") for row in rows):
        columns += DRIFT_COLUMNS
    return columns


def sparkline(values: list[float], width: int) -> str:
    """Return values as a line of bars, between the lowest and the highest; neighbours share one if the line
    is too short."""
    finite = [value for value in values if math.isfinite(value)]
    size = math.ceil(len(finite) / width) if finite else 1
    means = [sum(part) / len(part) for part in (finite[i : i + size] for i in range(0, len(finite), size))]
    if not means:
        return ""
    low, span = min(means), max(means) - min(means)
    return "".join(BARS[round((mean - low) / span * (len(BARS) - 1)) if span else 0] for mean in means)


class ProgressView:
    """Renders the progress of a run for rich, within the width and height of the console."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress
        self._spinner = Spinner("dots")
        self.is_over = False
        """True shows the steps only."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, MAX_WIDTH)
        if self._progress.rows:
            yield self._steps(width, max(options.size.height - LINES_BELOW, 1))
        if len(self._progress.rewards) > 1:
            yield self._reward(width)
        if not self.is_over:
            yield self._status()
            yield from (self._phase_bar(width, *item) for item in self._progress.phases)
            if self._progress.advisory is not None:
                yield self._advisory(width)

    def _steps(self, width: int, most: int) -> Table:
        """Return the table of the last steps, with the columns that the width has room for."""
        rows = list(self._progress.rows)[-most:]
        total = f"/{self._progress.total}" if self._progress.total else ""
        names = [label(step, metrics).removeprefix("step ") + total for step, metrics in rows]
        room = width - max(len(name) for name in [*names, "step"])
        table = Table("step", box=None, header_style="bold", pad_edge=False)
        cells = []
        for title, key, form in columns_of([metrics for _, metrics in rows]):
            column = [cell(metrics, key, form) for _, metrics in rows]
            room -= max(len(text) for text in [*column, title]) + 2
            if room < 0:
                break
            table.add_column(title)
            cells.append(column)
        for column_of_table in table.columns:
            column_of_table.justify = "right"
            column_of_table.no_wrap = True
        for index, name in enumerate(names):
            table.add_row(name, *(column[index] for column in cells))
        return table

    def _reward(self, width: int) -> Text:
        """Return the course of the training reward as a line of bars."""
        rewards = self._progress.rewards
        first, last = f"reward {rewards[0]:.3f} ", f" {rewards[-1]:.3f}"
        bars = sparkline(rewards, max(min(width - len(first) - len(last), 60), 1))
        return Text.assemble(first, (bars, "green"), last, no_wrap=True, overflow="crop")

    def _status(self) -> Table:
        """Return the line of the step and the time left."""
        progress = self._progress
        step = "starting"
        if progress.rows and progress.total:
            step = f"step {min(progress.step + 1, progress.total)} of {progress.total}"
        elif progress.rows:
            step = f"step {progress.step + 1}"
        words = [progress.stage or step, format_seconds(progress.seconds)]
        if not progress.stage and (left := progress.seconds_left) is not None:
            words.append(f"about {format_seconds(left)} left")
        if progress.folder is not None:
            words.append(f"raylight ui {progress.folder}")
        line = Table.grid(padding=(0, 1))
        self._spinner.update(text=Text("  ".join(words)))
        line.add_row(self._spinner)
        return line

    def _phase_bar(self, width: int, phase: StepPhase, seconds: float) -> Table:
        """Return the line of a phase: its name, how much of it is done, and its seconds so far."""
        cells: list[RenderableType] = [" ", Text(phase.name)]
        if phase.total > 1:
            bar_width = max(min(width - 50, 40), 10)
            cells += [ProgressBar(phase.total, phase.done, bar_width), f"{phase.done}/{phase.total}"]
        line = Table.grid(padding=(0, 1))
        line.add_row(*cells, format_seconds(seconds))
        return line

    def _advisory(self, width: int) -> Text:
        """Return the last advisory, in a few lines."""
        advisory = self._progress.advisory
        assert advisory is not None
        text = advisory_text(advisory)
        text.truncate(width * ADVISORY_LINES, overflow="ellipsis")
        return text
