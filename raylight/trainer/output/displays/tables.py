"""Tables that a command prints at its end: the summary of a run, and the scores of an evaluation."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from raylight.trainer.output.eval_comparison import SavedEvaluation, compare
from raylight.trainer.output.scores import Spread
from raylight.types import JsonObject


def print_summary(summary: JsonObject, folder: str) -> None:
    """Print the reward or the loss before and after training, and the files of the run."""
    table = Table(title="raylight", title_style="bold", show_header=True)
    table.add_column("")
    table.add_column("before", justify="right")
    table.add_column("after", justify="right")
    figure = "reward" if "reward" in summary else "loss"
    values = [summary[f"{figure}_before"], summary[f"{figure}_after"]]
    name = f"{'validation' if summary[figure].startswith('val/') else 'training'} {figure}"
    table.add_row(name, *("-" if value is None else f"{value:.3f}" for value in values))
    console = Console()
    console.print(table)
    if best := summary.get("best"):
        console.print(f"best: {best['metric']} {best['value']:.3f} at step {best['step']}", highlight=False)
    rollouts = _describe_rollouts(summary) if "rollouts" in summary else ""
    console.print(f"{summary['steps']} steps, {rollouts}{summary['seconds']:.0f} s", highlight=False)
    kept = ("checkpoint", "best") if best else ("checkpoint",)
    _print_files(
        console, folder, "config.yaml", "metrics.jsonl", "summary.json", "reward.png", *kept, "store.db"
    )


def _describe_rollouts(summary: JsonObject) -> str:
    failed = f", {summary['rollouts_failed']} failed" if summary["rollouts_failed"] else ""
    lost = f" ({summary['rollouts_lost']} because of the infrastructure)" if summary["rollouts_lost"] else ""
    return f"{summary['rollouts']} rollouts{failed}{lost}, "


def print_run(summary: JsonObject, folder: str) -> None:
    """Print the rollout counts of an algorithm with its own loop, and the files of the run."""
    console = Console()
    by_status = ", ".join(f"{count} {status}" for status, count in summary["by_status"].items())
    console.print(
        f"{summary['rollouts']} rollouts ({by_status or 'none'}), {summary['seconds']:.0f} s", highlight=False
    )
    _print_files(console, folder, "config.yaml", "summary.json", "store.db")


def print_scores(figures: JsonObject, folder: str) -> None:
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


def print_comparison(evaluations: list[SavedEvaluation]) -> None:
    """Print evaluations by benchmark or agent, each with its paired difference to the first one."""
    table = Table(title="evaluations", title_style="bold")
    for name in ("agent", "run", "model"):
        table.add_column(name, overflow="fold")
    for name in ("mean", "95% interval", "tasks", "difference", "95% interval"):
        table.add_column(name, justify="right")
    console, notes = Console(), []
    for agent in dict.fromkeys(one.agent for one in evaluations):
        first, *others = (one for one in evaluations if one.agent == agent)
        table.add_row(*map(escape, (agent, first.name, first.model)), *_mean(first.mean), "", "")
        for other in others:
            found = compare(first, other)
            shown = ("no common task", "") if found is None else _mean(found, "+")[:2]
            table.add_row("", *map(escape, (other.name, other.model)), *_mean(other.mean), *shown)
            if found is not None and found.rollouts < max(len(first.rewards), len(other.rewards)):
                notes.append(f"{agent}: {first.name} and {other.name} share {found.rollouts} tasks")
            if differing := first.differing_settings(other):
                notes.append(f"{agent}: {first.name} and {other.name} differ in {', '.join(differing)}")
        table.add_section()
    console.print(table)
    for note in notes:
        console.print(note, highlight=False, soft_wrap=True)


def _mean(spread: Spread, sign: str = "") -> tuple[str, str, str]:
    """Return the mean, its interval and the number of tasks of values by task, with or without a sign."""
    low_high = [f"{bound:{sign}.4f}" for bound in spread.interval or ()]
    return f"{spread.mean:{sign}.4f}", " to ".join(low_high) or "-", str(spread.rollouts)


def _print_files(console: Console, folder: str, *names: str) -> None:
    for name in names:
        if Path(folder, name).exists():
            console.print(f"  {folder}/{name}", highlight=False, soft_wrap=True)
