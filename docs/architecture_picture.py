"""Draw docs/architecture.svg: python docs/architecture_picture.py [OTHER.png]"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

PICTURE = Path(__file__).parent / "architecture.svg"
INK, QUIET = "#1c2733", "#5b6875"
OURS, USERS, GROUND = "#dbe9f9", "#fbe7c6", "#f5f7f9"
SIZE = (12.0, 7.0)
"""Inches. The axes count tenths of an inch."""


@dataclass(frozen=True)
class Box:
    """A process and its work. Positions and sizes in tenths of an inch, from the lower left corner."""

    x: float
    y: float
    width: float
    height: float
    title: str
    text: str = ""
    colour: str = OURS

    def at(self, across: float, up: float) -> tuple[float, float]:
        """Return a point of the box, by fractions of its width and height."""
        return self.x + across * self.width, self.y + up * self.height


DRIVER = Box(
    4, 52, 30, 14, "driver", "Trainer and algorithm:\nenqueue, make a batch of\ntrajectories, validate, stop"
)
STORE = Box(
    46,
    52,
    28,
    14,
    "StoreActor",
    "rollouts, attempts, leases,\nspans, every sampled token;\nstore.db (SQLite)",
)
RUNNERS = Box(
    88,
    52,
    28,
    14,
    "RunnerActor  x n",
    "run your agent: coroutines on\na loop, functions in threads;\nhooks, spans, rewards",
)
AGENT = Box(91, 17, 22, 12, "your agent", "OpenAI or Anthropic client,\nany framework", USERS)
ENGINES = Box(
    46,
    10,
    28,
    18,
    "Serve replica  x n",
    "gateway: keys, dialects\ncapture: tokens, log-probs\nengine: vLLM, transformers,\nor any URL upstream",
)
LEARNERS = Box(
    4,
    10,
    30,
    18,
    "LearnerActor  x n",
    "verl's FSDP2 engine: policy,\nreference, critic, adapter;\nadvantages and loss\non every rank",
)
COORDINATOR = Box(16, 35.5, 18, 9, "coordinator", "orders to engines")


def main(also: Path | None = None) -> None:
    plt.rcParams.update({"svg.hashsalt": "raylight", "font.family": "DejaVu Sans", "svg.fonttype": "path"})
    figure = plt.figure(figsize=SIZE)
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, SIZE[0] * 10), ylim=(0, SIZE[1] * 10))
    axes.axis("off")
    axes.add_patch(
        FancyBboxPatch(
            (1.5, 1.5),
            117,
            67,
            boxstyle="round,pad=0,rounding_size=1.5",
            facecolor=GROUND,
            edgecolor="#c9d1d9",
        )
    )
    axes.text(
        3.4, 3.2, "a Ray cluster: one laptop, or many machines", fontsize=9, color=QUIET, style="italic"
    )
    for box in (DRIVER, STORE, RUNNERS, AGENT, ENGINES, LEARNERS, COORDINATOR):
        draw(axes, box)
    arrow(axes, DRIVER.at(1, 0.68), STORE.at(0, 0.68), "1  enqueue", above=True)
    arrow(axes, STORE.at(0, 0.3), DRIVER.at(1, 0.3), "6  finished")
    arrow(axes, STORE.at(1, 0.68), RUNNERS.at(0, 0.68), "2  lease", above=True)
    arrow(axes, RUNNERS.at(0, 0.3), STORE.at(1, 0.3), "5  reward")
    arrow(axes, RUNNERS.at(0.5, 0), AGENT.at(0.5, 1), "", right="task, llm")
    arrow(axes, AGENT.at(0, 0.5), ENGINES.at(1, 13 / 18), "3  HTTP", above=True)
    arrow(axes, ENGINES.at(0.5, 1), STORE.at(0.5, 0), "", right="4  calls, token for token")
    arrow(axes, DRIVER.at(4 / 30, 0), LEARNERS.at(4 / 30, 1), "", right="7  batch")
    arrow(axes, DRIVER.at(21 / 30, 0), COORDINATOR.at(0.5, 1), "", right="8  new version")
    arrow(axes, COORDINATOR.at(1, 0.4), ENGINES.at(0.12, 1), "", right="9  load, probe")
    arrow(axes, LEARNERS.at(1, 0.5), ENGINES.at(0, 0.5), "weights\n(broadcast)", above=True, dashed=True)
    key = "blue: raylight's actors and replicas\nyellow: yours, unchanged"
    axes.text(88, 8, key, fontsize=9, color=QUIET, va="center", linespacing=1.5)
    figure.savefig(PICTURE, metadata={"Date": None})
    if also is not None:
        figure.savefig(also, dpi=110)


def draw(axes: Axes, box: Box) -> None:
    style = "round,pad=0,rounding_size=1"
    corner = (box.x, box.y)
    axes.add_patch(
        FancyBboxPatch(
            corner, box.width, box.height, style, facecolor=box.colour, edgecolor=INK, linewidth=1.1
        )
    )
    middle = box.x + box.width / 2
    axes.text(
        middle,
        box.y + box.height - 1.2,
        box.title,
        fontsize=11.5,
        weight="bold",
        color=INK,
        ha="center",
        va="top",
    )
    axes.text(
        middle,
        box.y + (box.height - 3.4) / 2,
        box.text,
        fontsize=9.5,
        color=INK,
        ha="center",
        va="center",
        linespacing=1.45,
    )


def arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    label: str,
    *,
    above: bool = False,
    right: str = "",
    dashed: bool = False,
) -> None:
    """From one point to another, with a label over, under or to the right of its middle."""
    style = {
        "arrowstyle": "-|>",
        "color": INK,
        "linewidth": 1.3,
        "linestyle": "--" if dashed else "-",
        "shrinkA": 0,
        "shrinkB": 0,
    }
    axes.annotate("", xy=end, xytext=start, arrowprops=style)
    x, y = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
    if label:
        axes.text(
            x,
            y + (0.6 if above else -0.6),
            label,
            fontsize=9,
            color=INK,
            ha="center",
            va="bottom" if above else "top",
        )
    if right:
        clear = 1 if start[0] == end[0] else 3  # of a line that slants
        axes.text(x + clear, y, right, fontsize=9, color=INK, ha="left", va="center")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
