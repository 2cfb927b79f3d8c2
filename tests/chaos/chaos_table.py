"""The table of faults: what each run did, how long it took, and what it lost or left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from chaos_evidence import Finding, count_findings
from chaos_faults import Fault


@dataclass
class Row:
    """Result of a fault: a row of the table.

    Attributes:
        ends: how each driver ended: "completed", an error's name, "signal N", "untyped" or "hang".
        rollout_s: seconds from the fault to the end of the next rollout that began after it.
        step_s: seconds from the fault to the end of the next step whose update began after it.
        left: processes and files that were left behind.
        notes: further facts for a person.
    """

    fault: Fault
    ends: list[str] = field(default_factory=list)
    rollout_s: float | None = None
    step_s: float | None = None
    findings: list[Finding] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def expected_ends(self) -> list[str]:
        return ["completed"] if self.fault.error is None else [self.fault.error, "completed"]

    @property
    def faults_found(self) -> list[str]:
        """Everything that is not as it should be; an empty list if the run passed."""
        found = [f"{finding.kind}: {finding.text}" for finding in self.findings]
        found += [f"left behind: {item}" for item in self.left]
        expected = [end or self.ends[0] for end in self.expected_ends] if self.ends else []
        if self.ends != expected or "hang" in self.ends or "untyped" in self.ends:
            found.insert(0, f"ended as {self.ends}, not as {self.expected_ends}")
        return found + self.notes


HEADINGS = ("fault", "when", "what", "outcome", "next rollout", "next step", "lost/wrong/twice", "left")


def cells(row: Row) -> list[str]:
    """Return a row of the table as text."""
    counts = count_findings(row.findings)
    fault = row.fault
    what = f"{'every ' if fault.every else ''}{fault.target} {fault.description}".strip()
    seconds = ["-" if s is None else f"{s:.1f} s" for s in (row.rollout_s, row.step_s)]
    outcome = ", then ".join(row.ends)
    return [
        fault.name,
        f"random, seed {fault.seed}" if fault.when == "random" else fault.when,
        what,
        outcome if not row.faults_found else f"{outcome} (!)",
        *seconds,
        "/".join(str(counts[kind]) for kind in ("lost", "wrong", "twice")),
        str(len(row.left)) if row.left else "-",
    ]


def format_table(rows: list[dict[str, Any]]) -> str:
    """Return the table, and below it what is not as it should be.

    Args:
        rows: of each run, the `cells`, and the `faults` that were found.
    """
    lines = [list(HEADINGS), *(row["cells"] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    table += [f"{row['cells'][0]}: {text}" for row in rows for text in row["faults"]]
    return "\n".join(line.rstrip() for line in table)
