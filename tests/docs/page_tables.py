"""Tables of documentation pages, so that tests can compare them with the code."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Table:
    """Markdown table: the cells of its header and of each row."""

    page: Path
    header: list[str]
    rows: list[list[str]]


def tables(page: Path) -> Iterator[Table]:
    """Iterate over the tables of a page, in order."""
    block: list[str] = []
    for line in [*page.read_text().splitlines(), ""]:
        if line.startswith("|"):
            block.append(line)
        elif block:
            header, rule, *rows = (cells(text) for text in block)
            assert all(re.fullmatch(r":?-+:?", cell) for cell in rule), (
                f"{page}: a table has no rule below its header: {block[:2]}"
            )
            assert all(len(row) == len(header) for row in rows), (
                f"{page}: a row of the table {header} has another number of cells"
            )
            yield Table(page, header, rows)
            block = []


def cells(line: str) -> list[str]:
    """Return the cells of a line. An escaped `\\|` does not separate cells."""
    return [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def code(cell: str) -> str:
    """Return the code of a cell, which must contain nothing else.

    Raises:
        ValueError: the cell contains something else.
    """
    match = re.fullmatch(r"`([^`]+)`", cell)
    if match is None:
        raise ValueError(f"{cell!r} is not code alone")
    return match[1]
