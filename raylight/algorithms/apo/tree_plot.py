"""The prompts that were tried, as a tree."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from raylight.algorithms.apo.history import Candidate, History
from raylight.algorithms.apo.report import score

Place = tuple[float, float]


def layout(history: History) -> dict[str, Place]:
    """Where each prompt stands: its round, and a height near its parent's; prompts of a round never share a place."""
    places: dict[str, Place] = {}
    rounds = sorted({candidate.round for candidate in history.candidates})
    tallest = max(len(history.made_in(number)) for number in rounds)
    for number in rounds:
        made = sorted(history.made_in(number), key=lambda c: -places[c.parent][1] if c.parent else 0.0)
        gap = tallest / len(made)
        for row, candidate in enumerate(made):
            places[candidate.version] = (float(number), (len(made) - 1) / 2 * gap - row * gap)
            # those of one parent keep their order, the first on top
    return places


def plot_tree(history: History, path: Path) -> None:
    """Draw the prompts by round, each with a line from its parent, coloured by its score; kept ones have a dark edge, the best a
    star, and a cross tells how many rewrites of a round were rejected."""
    places = layout(history)
    heights = [y for _, y in places.values()]
    rounds = max(max(candidate.round for candidate in history.candidates), history.rounds_done, 1)
    figure = Figure(
        figsize=(3 + 2.6 * rounds, min(3 + 0.45 * (max(heights) - min(heights) + 1), 24)),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for candidate in history.candidates:
        if candidate.parent is not None:
            (x0, y0), (x1, y1) = places[candidate.parent], places[candidate.version]
            axes.plot([x0, x1], [y0, y1], color="lightgrey", linewidth=1, zorder=1)
    kept = {version for beam in history.beams for version in beam}
    scored = [candidate for candidate in history.candidates if _shown(candidate) is not None]
    dots = axes.scatter(
        [places[c.version][0] for c in scored],
        [places[c.version][1] for c in scored],
        c=[_shown(c) or 0.0 for c in scored],
        s=130,
        cmap="viridis",
        edgecolors=["black" if c.version in kept else "none" for c in scored],
        zorder=2,
    )
    x, y = places[history.best]
    axes.scatter([x], [y], marker="*", s=330, color="gold", edgecolors="black", zorder=3, label="best")
    for candidate in history.candidates:
        axes.annotate(
            f"{candidate.version}  {score(_shown(candidate))}",
            places[candidate.version],
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
    axes.set_xlabel("round in which the prompt was made (0: the seed); ✗: rewrites rejected")
    axes.set_yticks([])
    axes.margins(x=0.15, y=0.15)
    axes.legend(loc="upper left")
    if scored:
        figure.colorbar(dots, label="mean reward, on all validation tasks or else the last batch")
    figure.savefig(path, dpi=120)


def _shown(candidate: Candidate) -> float | None:
    return candidate.last_score if candidate.val_score is None else candidate.val_score
