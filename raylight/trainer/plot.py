"""The reward curve of a run."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator


def plot_rewards(history: list[dict[str, float]], path: Path) -> None:
    """Draw training and validation reward over steps, and below them the seconds of each stage."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    FigureCanvasAgg(figure)
    reward, seconds = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    for key, label, style in (("train/reward", "training", "-"), ("val/reward", "validation", "o-")):
        points = [(row["step"], row[key]) for row in history if key in row]
        if points:
            reward.plot(*zip(*points, strict=True), style, label=label)
    reward.set_ylabel("mean reward")
    reward.grid(alpha=0.3)
    if reward.get_lines():
        reward.legend(loc="lower right")
    stages = [("time/rollout_s", "rollout"), ("time/update_s", "update"), ("time/sync_s", "sync")]
    rows = [row for row in history if "time/rollout_s" in row]
    if rows:
        times = [[row.get(key, 0.0) for row in rows] for key, _ in stages]
        seconds.stackplot([row["step"] for row in rows], times, labels=[label for _, label in stages], alpha=0.8)
        seconds.legend(loc="upper right", ncols=3, fontsize="small")
    seconds.set_ylabel("seconds")
    seconds.set_xlabel("step")
    seconds.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120)
