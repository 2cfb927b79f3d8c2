"""Result of a search as a table in the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from raylight.algorithms.apo.history import History

EXCERPT_CHARACTERS = 60
"""Characters of a prompt in the table."""


def prompt_table(history: History) -> Table:
    """Return a table of all prompts with their parents, scores and first words; a star marks the best."""
    table = Table(title="prompts tried", title_style="bold")
    for name in ("prompt", "from", "round", "batch score", "validation", "in beam of", "text"):
        table.add_column(name, justify="left" if name in ("prompt", "from", "text") else "right")
    for candidate in history.candidates:
        best = candidate.version == history.best
        rounds = [
            str(number) for number, beam in enumerate(history.beams) if number and candidate.version in beam
        ]
        table.add_row(
            f"{candidate.version} *" if best else candidate.version,
            candidate.parent or "-",
            str(candidate.round or "seed"),
            format_score(candidate.last_score),
            format_score(candidate.val_score),
            ", ".join(rounds) or "-",
            Text(excerpt(candidate.template.template)),
            style="bold green" if best else None,
        )
    return table


def print_result(history: History, console: Console) -> None:
    """Print the table, the number of rejected rewrites, and the best prompt."""
    console.print(prompt_table(history))
    if kinds := history.rejected_by_kind():
        console.print(
            Text(
                f"{sum(kinds.values())} rewrites rejected: "
                + ", ".join(f"{count} {kind}" for kind, count in kinds.items()),
                style="yellow",
            ),
            soft_wrap=True,
        )
    best, seed = history.best_candidate, history.candidates[0]
    before = f"; the seed {format_score(seed.val_score)}" if best is not seed else ""
    console.print(
        Text(f"best prompt: {best.version}, validation {format_score(best.val_score)}{before}", style="bold"),
        soft_wrap=True,
    )
    console.print(Text(best.template.template), soft_wrap=True)


def format_score(value: float | None) -> str:
    """Return a score with three decimals; "-" for None."""
    return "-" if value is None else f"{value:.3f}"


def excerpt(text: str) -> str:
    """Return the beginning of a prompt on one line."""
    line = " ".join(text.split())
    return line if len(line) <= EXCERPT_CHARACTERS else f"{line[: EXCERPT_CHARACTERS - 1]}…"
