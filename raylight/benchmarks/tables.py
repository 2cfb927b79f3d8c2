"""Tables of the catalogue of benchmarks."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from raylight.benchmarks.catalogue import BENCHMARKS, Benchmark


def print_catalogue() -> None:
    """Print all benchmarks: `raylight eval` without arguments."""
    table = Table(title="raylight eval BENCHMARK --model MODEL", title_style="bold")
    for name in ("benchmark", "questions", "data set", "rows", "tokens", "licence"):
        table.add_column(name, justify="right" if name in ("rows", "tokens") else "left", overflow="fold")
    for one in BENCHMARKS.values():
        table.add_row(one.name, one.title, one.repo, str(one.rows), str(one.max_tokens), one.license)
    Console().print(table)


def print_published(benchmark: Benchmark) -> None:
    """Print figures that were published for the benchmark, with what was different."""
    console = Console()
    console.print(f"published for {benchmark.name}:", highlight=False)
    for figure in benchmark.published:
        setting = f" ({figure.setting})" if figure.setting else ""
        console.print(
            f"  {figure.percent / 100:.3f}  {figure.model}{setting}, {figure.source}",
            highlight=False,
            soft_wrap=True,
        )
