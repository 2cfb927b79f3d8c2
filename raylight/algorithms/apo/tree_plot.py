"""Plot of a search as a tree of prompts."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from raylight.algorithms.apo.history import Candidate, History
from raylight.algorithms.apo.report import format_score

Position = tuple[float, float]
"""Round and height of a prompt in the plot."""


def layout(history: History) -> dict[str, Position]:
    """Return the position of each prompt.

    Prompts of a round are ordered by the heights of their parents, so that lines do not cross, and never
    overlap.
    """
    positions: dict[str, Position] = {}
    rounds = sorted({candidate.round for candidate in history.candidates})
    tallest = max(len(history.created_in(number)) for number in rounds)
    for number in rounds:
        created = sorted(
            history.created_in(number), key=lambda c: -positions[c.parent][1] if c.parent else 0.0
        )
        gap = tallest / len(created)
        for row, candidate in enumerate(created):
            positions[candidate.version] = (float(number), (len(created) - 1) / 2 * gap - row * gap)
            # children of one parent keep their order, the first on top
    return positions


def plot_tree(history: History, path: Path) -> None:
    """Write a plot of the prompts by round, each with a line from its parent and coloured by its score.

    Prompts that were in a beam have a dark edge, and the best has a star. A cross with a number counts the
    rejected rewrites of a round.
    """
    positions = layout(history)
    heights = [y for _, y in positions.values()]
    rounds = max(max(candidate.round for candidate in history.candidates), history.rounds_done, 1)
    figure = Figure(
        figsize=(3 + 2.6 * rounds, min(3 + 0.45 * (max(heights) - min(heights) + 1), 24)),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for candidate in history.candidates:
        if candidate.parent is not None:
            (x0, y0), (x1, y1) = positions[candidate.parent], positions[candidate.version]
            axes.plot([x0, x1], [y0, y1], color="lightgrey", linewidth=1, zorder=1)
    kept = {version for beam in history.beams for version in beam}
    scored = [candidate for candidate in history.candidates if _score(candidate) is not None]
    dots = axes.scatter(
        [positions[c.version][0] for c in scored],
        [positions[c.version][1] for c in scored],
        c=[score for c in history.candidates if (score := _score(c)) is not None],
        s=130,
        cmap="viridis",
        edgecolors=["black" if c.version in kept else "none" for c in scored],
        zorder=2,
    )
    x, y = positions[history.best]
    axes.scatter([x], [y], marker="*", s=330, color="gold", edgecolors="black", zorder=3, label="best")
    for candidate in history.candidates:
        axes.annotate(
            f"{candidate.version}  {format_score(_score(candidate))}",
            positions[candidate.version],
            xytext=(9, 5),
            textcoords="offset points",
            fontsize=8,
        )
    for number, count in Counter(rejection.round for rejection in history.rejections).items():
        axes.annotate(
            f"{count} ✗",
            (number, min(heights)),
            xytext=(-6, -22),
            textcoords="offset points",
            color="firebrick",
        )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("round in which the prompt was created (0: the seed); ✗: rejected rewrites")
    axes.set_yticks([])
    axes.margins(x=0.15, y=0.15)
    axes.legend(loc="upper left")
    if scored:
        figure.colorbar(dots, label="mean reward on all validation tasks, or else on the last batch")
    figure.savefig(path, dpi=120)


def _score(candidate: Candidate) -> float | None:
    return candidate.last_score if candidate.val_score is None else candidate.val_score
