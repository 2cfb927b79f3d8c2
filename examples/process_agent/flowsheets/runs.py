"""Registry of simulations; the results of the latest ones are kept."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from examples.process_agent.flowsheets.errors import SimulationError, UnknownRunError
from examples.process_agent.flowsheets.model import Flowsheet

KEPT = 2000
"""Number of simulations whose results are kept."""
DIGITS = 7
"""Significant digits of the numbers in a result."""


@dataclass(frozen=True)
class Run:
    """A simulation.

    Attributes:
        results: results of all streams and units; None if it failed.
        error: `SimulationError.as_json` of its failure; None if it converged.
    """

    run_id: str
    results: dict[str, Any] | None
    error: dict[str, Any] | None

    def as_json(self) -> dict[str, Any]:
        """The status as JSON, with the names of the results."""
        if self.results is None:
            return {"run_id": self.run_id, "status": "failed", "error": self.error}
        names = {kind: list(found) for kind, found in self.results.items()}
        return {"run_id": self.run_id, "status": "converged", **names}


class Runs:
    """Simulations, executed in the calling thread, one at a time, because thermo's shared flash objects keep
    state."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, Run] = OrderedDict()
        self._one = threading.Lock()

    def simulate(self, given: Any) -> Run:
        """Simulate a flowsheet (JSON). A simulation that does not converge is a failed run.

        Raises:
            SimulationError: the input is not a flowsheet, and nothing was run.
        """
        with self._one:
            flowsheet = Flowsheet.read(given)
            run_id = f"run-{secrets.token_hex(4)}"
            try:
                run = Run(run_id, rounded(flowsheet.solve()), None)
            except SimulationError as error:
                if error.code == "unknown_component":
                    raise
                run = Run(run_id, None, error.as_json())
            self._found[run_id] = run
            while len(self._found) > KEPT:
                self._found.popitem(last=False)
        return run

    def result(self, run_id: str, paths: list[str]) -> dict[str, Any]:
        """Return results by dotted path, such as `streams.gas.flow_kmol_h` or `units.drum`; all results
        without paths.

        Raises:
            UnknownRunError: the simulation is unknown, failed, or has no such path.
        """
        with self._one:
            run = self._found.get(run_id)
        if run is None:
            raise UnknownRunError(
                f"there is no simulation {run_id!r}; pass the run_id that run_simulation returned"
            )
        if run.results is None:
            assert run.error
            raise UnknownRunError(f"simulation {run_id} failed and has no results: {run.error['message']}")
        if not paths:
            return run.results
        return {path: look_up(run.results, path) for path in paths}


def look_up(results: dict[str, Any], path: str) -> Any:
    """Return the result at a dotted path.

    Raises:
        UnknownRunError: the path does not exist; the message has the part that does.
    """
    found: Any = results
    walked: list[str] = []
    for part in path.split("."):
        if not isinstance(found, dict) or part not in found:
            there = ", ".join(found) if isinstance(found, dict) else "a number"
            raise UnknownRunError(f"there is no result {path!r}: {'.'.join(walked) or 'the top'} has {there}")
        found = found[part]
        walked.append(part)
    return found


def rounded(found: Any) -> Any:
    """Round the numbers of a result."""
    if isinstance(found, dict):
        return {name: rounded(value) for name, value in found.items()}
    return float(f"{found:.{DIGITS}g}") if isinstance(found, float) else found
