"""Plots: the reward curves of a training run, and the rewards of an evaluation."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from raylight.trainer.output.scores import NORMAL_95
from raylight.types import JsonObject

MAX_BINS = 30


def plot_rewards(history: list[dict[str, float]], path: Path, best: JsonObject | None = None) -> None:
    """Plot training and validation reward over steps, and below them the seconds of each stage.

    Args:
        history: the metrics of each step, with the step as `step`.
        best: content of `best.json`; its step is marked.
    """
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    reward, seconds = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for key, label, style in (("train/reward", "training", "-"), ("val/reward", "validation", "o-")):
        rows = [row for row in history if key in row]
        if not rows:
            continue
        steps, means, errors = (
            [row.get("val/step", row["step"]) for row in rows],
            [row[key] for row in rows],
            [_error(row, key) for row in rows],
        )
        (line,) = reward.plot(steps, means, style, label=label)
        low, high = (
            [mean + side * NORMAL_95 * error for mean, error in zip(means, errors, strict=True)]
            for side in (-1, 1)
        )
        reward.fill_between(steps, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    if best is not None and math.isfinite(best["value"]):
        reward.axvline(best["step"], color="black", linewidth=0.8, linestyle=":")
        marked = {
            "marker": "*",
            "markersize": 14,
            "color": "gold",
            "markeredgecolor": "black",
            "linestyle": "none",
        }
        shown = best["metrics"].get("val/reward", best["value"])
        reward.plot(
            [best["step"]],
            [shown],
            label=f"best {best['metric']}: {best['value']:.3g}, step {best['step']}",
            **marked,
        )
    reward.set_ylabel("mean reward (95% interval)")
    reward.grid(alpha=0.3)
    if reward.get_lines():
        reward.legend(loc="lower right")
    stages = [("time/rollout_s", "rollout"), ("time/update_s", "update"), ("time/sync_s", "sync")]
    rows = [row for row in history if "time/rollout_s" in row]
    if rows:
        times = [[row.get(key, 0.0) for row in rows] for key, _ in stages]
        seconds.stackplot(
            [row["step"] for row in rows], times, labels=[label for _, label in stages], alpha=0.8
        )
        seconds.legend(loc="upper right", ncols=3, fontsize="small")
    seconds.margins(y=0.4)
    seconds.set_ylabel("seconds")
    seconds.set_xlabel("step")
    seconds.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120)


def _error(row: dict[str, float], key: str) -> float:
    """Return the standard error of a mean reward; training rollouts count as independent."""
    if key == "val/reward":
        return row.get("val/reward_error", 0.0)
    return row.get("train/reward_std", 0.0) / math.sqrt(max(row.get("train/rollouts", 1.0), 1.0))


def plot_histogram(rewards: dict[str, list[float]], path: Path) -> None:
    """Plot a histogram of each reward.

    Args:
        rewards: values by the name of the reward.
    """
    figure = Figure(figsize=(7, 3 * max(len(rewards), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (name, values) in zip(
        figure.subplots(len(rewards), 1, squeeze=False)[:, 0], rewards.items(), strict=True
    ):
        mean = sum(values) / len(values)
        axes.hist(values, bins=min(MAX_BINS, max(10, math.isqrt(len(values)))), alpha=0.8)
        axes.axvline(mean, color="black", linewidth=1, linestyle="--", label=f"mean {mean:.3g}")
        axes.set_xlabel(name)
        axes.set_ylabel("rollouts")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend()
    figure.savefig(path, dpi=120)
