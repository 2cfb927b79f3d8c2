"""Displays of a run in progress: a live table in a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import deque
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.spinner import Spinner
from rich.table import Table

from raylight.trainer.loggers import VAL_STEP, Display, Metrics

TABLE_ROWS = 15
"""Number of steps in the live table."""

COLUMNS: list[tuple[str, str, str]] = [  # title, metric, format
    ("reward", "train/reward", "{:.3f}"),
    ("validation", "val/reward", "{:.3f}"),
    ("failed", "train/failed", "{:.0f}"),
    ("tokens/answer", "train/response_tokens", "{:.1f}"),
    ("tokens/s", "train/tokens_per_s", "{:.0f}"),
    ("rollout s", "time/rollout_s", "{:.2f}"),
    ("update s", "time/update_s", "{:.2f}"),
    ("sync s", "time/sync_s", "{:.3f}"),
]

DRIFT_COLUMNS: list[tuple[str, str, str]] = [
    ("drifts", "trace/drifts", "{:.0f}"),
    ("rows/rollout", "trace/rows_per_rollout", "{:.2f}"),
]
"""Columns that are shown once calls start new rows although they continue a conversation."""
OVERLAP_COLUMNS: list[tuple[str, str, str]] = [
    ("staleness", "async/staleness_mean", "{:.2f}"),
    ("oldest", "async/staleness_max", "{:.0f}"),
]
"""Columns of asynchronous training."""


def cell(metrics: Metrics, key: str, form: str) -> str:
    """Return a formatted metric; empty if a step does not have it."""
    return form.format(metrics[key]) if key in metrics else ""


def label(step: int, metrics: Metrics) -> str:
    """Return the name of a row: a step, or the evaluation of one."""
    return f"evaluation of step {metrics[VAL_STEP]:.0f}" if VAL_STEP in metrics else f"step {step}"


def columns_of(rows: list[Metrics]) -> list[tuple[str, str, str]]:
    """Return the columns that the metrics of some steps need."""
    columns = list(COLUMNS)
    if any("async/staleness_mean" in row for row in rows):
        columns += OVERLAP_COLUMNS
    if any(row.get("trace/drifts") for row in rows):
        columns += DRIFT_COLUMNS
    return columns


class PlainDisplay:
    """Prints one line per step."""

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total

    def __enter__(self) -> PlainDisplay:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def stage(self, text: str) -> None:
        self._print(text)

    def progress(self, text: str) -> None:
        """Print nothing: each update would be a line of its own."""

    def step(self, step: int, metrics: Metrics) -> None:
        columns = columns_of([metrics])
        shown = [f"{name} {cell(metrics, key, form)}" for name, key, form in columns if key in metrics]
        self._print(f"{label(step, metrics)}/{self._total}  " + "  ".join(shown))

    def note(self, text: str) -> None:
        self._print(f"note: {text}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """Shows a table of the last steps, which is redrawn in place."""

    def __init__(self, console: Console, total: int) -> None:
        self._total = total
        self._rows: deque[tuple[int, Metrics]] = deque(maxlen=TABLE_ROWS)
        self._spinner = Spinner("dots", "starting")
        self._live = Live(console=console, refresh_per_second=4, get_renderable=self._render)

    def __enter__(self) -> LiveDisplay:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spinner.update(text="")
        self._live.__exit__(kind, error, trace)

    def stage(self, text: str) -> None:
        self._spinner.update(text=escape(text))

    def progress(self, text: str) -> None:
        self.stage(text)

    def step(self, step: int, metrics: Metrics) -> None:
        self._rows.append((step, metrics))

    def note(self, text: str) -> None:
        self._live.console.print(escape(text), style="yellow", highlight=False)

    def _render(self) -> Group:
        columns = columns_of([metrics for _, metrics in self._rows])
        names = [name for name, _, _ in columns]
        table = Table("step", *names, box=None, header_style="bold", pad_edge=False)
        for column in table.columns:
            column.justify = "right"
        for step, metrics in self._rows:
            named = label(step, metrics).removeprefix("step ")
            table.add_row(f"{named}/{self._total}", *(cell(metrics, key, form) for _, key, form in columns))
        return Group(table, self._spinner)


class SilentDisplay(PlainDisplay):
    """Prints notes only."""

    def stage(self, text: str) -> None:
        pass

    def step(self, step: int, metrics: Metrics) -> None:
        pass


def make_display(progress: bool, total: int) -> AbstractContextManager[Display]:
    """Return a display for standard output.

    Args:
        progress: False shows notes only.
        total: planned number of steps.
    """
    console = Console()
    if not progress:
        return SilentDisplay(console, total)
    return (
        LiveDisplay(console, total)
        if console.is_terminal and not console.is_jupyter
        else PlainDisplay(console, total)
    )


def print_summary(summary: dict[str, Any], folder: str) -> None:
    """Print the reward before and after training, and the files of the run."""
    table = Table(title="raylight", title_style="bold", show_header=True)
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    values = [summary["reward_before"], summary["reward_after"]]
    name = "validation reward" if summary["reward"] == "val/reward" else "training reward"
    table.add_row(name, *("-" if value is None else f"{value:.3f}" for value in values))
    console = Console()
    console.print(table)
    if best := summary.get("best"):
        console.print(f"best: {best['metric']} {best['value']:.3f} at step {best['step']}", highlight=False)
    lost = f" ({summary['rollouts_lost']} because of the infrastructure)" if summary["rollouts_lost"] else ""
    failed = summary["rollouts_failed"]
    console.print(
        f"{summary['steps']} steps, {summary['rollouts']} "
        f"rollouts{f', {failed} failed' if failed else ''}{lost}, {summary['seconds']:.0f} s",
        highlight=False,
    )
    kept = ("checkpoint", "best") if best else ("checkpoint",)
    _print_files(
        console, folder, "config.yaml", "metrics.jsonl", "summary.json", "reward.png", *kept, "store.db"
    )


def print_run(summary: dict[str, Any], folder: str) -> None:
    """Print the rollout counts of an algorithm with its own loop, and the files of the run."""
    console = Console()
    by_status = ", ".join(f"{count} {status}" for status, count in summary["by_status"].items())
    console.print(
        f"{summary['rollouts']} rollouts ({by_status or 'none'}), {summary['seconds']:.0f} s", highlight=False
    )
    _print_files(console, folder, "config.yaml", "summary.json", "store.db")


def print_scores(figures: dict[str, Any], folder: str) -> None:
    """Print the scores of an evaluation.

    Args:
        figures: content of `eval.json`.
    """
    table = Table(title=f"{figures['agent']} with {figures['model']}", title_style="bold")
    for name in ("reward", "mean", "std", "± error", "95% interval", "rollouts"):
        table.add_column(name, justify="left" if name == "reward" else "right")
    for name, spread in figures["rewards"].items():
        shown = (
            figures["primary"] if name == "reward" and figures["primary"] not in (None, "primary") else name
        )
        interval, error = spread["interval_95"], spread["standard_error"]
        table.add_row(
            escape(shown),
            f"{spread['mean']:.4f}",
            f"{spread['std']:.4f}",
            "-" if error is None else f"{error:.4f}",
            "-" if interval is None else f"{interval[0]:.4f} to {interval[1]:.4f}",
            str(spread["rollouts"]),
        )
    console = Console()
    console.print(table)
    for title, by_number in (("pass@", figures["pass_at"]), ("best of ", figures["best_of"])):
        if figures["samples"] > 1 and by_number:
            console.print(
                "  ".join(f"{title}{k}: {value:.4f}" for k, value in by_number.items()), highlight=False
            )
    lost = f" ({figures['lost']} because of the infrastructure)" if figures["lost"] else ""
    unscored = f", {figures['unscored']} without a reward" if figures["unscored"] else ""
    console.print(
        f"{figures['tasks']} tasks, {figures['rollouts']} rollouts, {figures['failed']} "
        f"failed{lost}{unscored}; {figures['calls']} calls, {figures['tokens_per_rollout']:.1f} tokens per "
        f"rollout; {figures['seconds']:.1f} s, {figures['tokens_per_s']:.0f} tokens/s",
        highlight=False,
        soft_wrap=True,
    )
    _print_files(console, folder, "eval.json", "eval.jsonl", "eval.png", "eval.db")


def _print_files(console: Console, folder: str, *names: str) -> None:
    for name in names:
        if Path(folder, name).exists():
            console.print(f"  {folder}/{name}", highlight=False, soft_wrap=True)
