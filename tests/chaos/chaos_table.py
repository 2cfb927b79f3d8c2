"""The table of faults: how long each run took to recover from each, and what it lost or left."""

from dataclasses import dataclass, field
from typing import Any

from chaos_evidence import Finding, count_findings
from chaos_faults import Fault
from chaos_runs import ChaosRun


@dataclass
class Strike:
    """A fault that was injected.

    Attributes:
        at: time of the fault, as of `time.monotonic`.
        resumed_at: time of the start of the next driver, if the fault ended one.
        waited: seconds between the end of a driver and the start of the next, which are not the run's.
        end: how the fault ended the driver; "" if it did not.
        rollout_s: seconds from the fault to the end of the next rollout that began after it.
        step_s: seconds from the fault to the end of the next step whose update began after it.
    """

    fault: Fault
    at: float
    resumed_at: float | None = None
    waited: float = 0.0
    end: str = ""
    rollout_s: float | None = None
    step_s: float | None = None


@dataclass
class Result:
    """Result of a run.

    Attributes:
        ends: how each driver ended: "completed", an error's name, "signal N", "untyped" or "hang".
        left: processes and files that were left behind.
        notes: further facts for a person.
    """

    run: ChaosRun
    strikes: list[Strike] = field(default_factory=list)
    ends: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def faults_found(self) -> list[str]:
        """Everything that is not as it should be; an empty list if the run passed."""
        found = [f"{finding.kind}: {finding.text}" for finding in self.findings]
        found += [f"left behind: {item}" for item in self.left]
        expected = self.run.expected_ends
        any_signal = [end or "signal" for end in expected]
        ends = [
            "signal" if want == "" and end.startswith("signal") else end
            for end, want in zip(self.ends, [*expected, *self.ends], strict=False)
        ]
        if ends != any_signal:
            found.insert(0, f"ended as {self.ends}, not as {any_signal}")
        return found + self.notes


HEADINGS = ("run", "fault", "when", "outcome", "next rollout", "next step", "lost/wrong/twice", "left")


def rows(result: Result) -> list[list[str]]:
    """Return the rows of the table, one for each fault. The last one has the outcome of the run."""
    found = []
    for strike in result.strikes:
        fault = strike.fault
        when = f"random, seed {result.run.seed}" if fault.when == "random" else fault.when
        seconds = ["-" if s is None else f"{s:.1f} s" for s in (strike.rollout_s, strike.step_s)]
        found.append(["", fault.description, when, strike.end, *seconds, "", ""])
    counts = count_findings(result.findings)
    last = result.ends[-1] + (" (!)" if result.faults_found else "") if result.ends else "-"
    if not found:
        found.append([""] * len(HEADINGS))
    found[0][0] = result.run.name
    found[-1][3] = f"{found[-1][3]}, {last}".removeprefix(", ")
    found[-1][6] = "/".join(str(counts[kind]) for kind in ("lost", "wrong", "twice"))
    found[-1][7] = str(len(result.left)) if result.left else "-"
    return found


def format_table(results: list[dict[str, Any]]) -> str:
    """Return the table, and below it what is not as it should be.

    Args:
        results: of each run, its `name`, its `rows`, and the `faults` that were found.
    """
    lines = [list(HEADINGS), *(row for result in results for row in result["rows"])]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADINGS))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    table += [f"{result['name']}: {text}" for result in results for text in result["faults"]]
    return "\n".join(line.rstrip() for line in table)
