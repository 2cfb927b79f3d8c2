"""Simulations that were asked for: each is run once, and its results are kept for a while."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from examples.process_agent.flowsheets.errors import SimulationError, UnknownRunError
from examples.process_agent.flowsheets.model import Flowsheet

KEPT = 2000
"""Simulations whose results can be asked for; older ones are forgotten."""
DIGITS = 7
"""Significant digits of a number in a result."""


@dataclass(frozen=True)
class Run:
    """A simulation.

    Attributes:
        results: all streams and units in numbers; None if it failed.
        error: why it failed, as `SimulationError.told`; None if it converged.
    """

    run_id: str
    results: dict[str, Any] | None
    error: dict[str, Any] | None

    def told(self) -> dict[str, Any]:
        """Whether it converged, and what there is to ask for."""
        if self.results is None:
            return {"run_id": self.run_id, "status": "failed", "error": self.error}
        names = {kind: list(found) for kind, found in self.results.items()}
        return {"run_id": self.run_id, "status": "converged", **names}


class Runs:
    """Runs simulations in whichever thread asks, one at a time: thermo's flash objects are shared and remember their last state."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, Run] = OrderedDict()
        self._one = threading.Lock()

    def simulate(self, given: Any) -> Run:
        """Simulate a flowsheet as JSON. A failure of its physics is a failed run.

        Raises:
            SimulationError: it is no flowsheet, so that nothing was run.
        """
        with self._one:
            flowsheet = Flowsheet.read(given)
            run_id = f"run-{secrets.token_hex(4)}"
            try:
                run = Run(run_id, rounded(flowsheet.solve()), None)
            except SimulationError as error:
                if error.code == "unknown_component":
                    raise
                run = Run(run_id, None, error.told())
            self._found[run_id] = run
            while len(self._found) > KEPT:
                self._found.popitem(last=False)
        return run

    def result(self, run_id: str, paths: list[str]) -> dict[str, Any]:
        """Results under dotted paths, such as `streams.gas.flow_kmol_h` or `units.drum`; all results if there are no paths.

        Raises:
            UnknownRunError: there is no such simulation, it failed, or it has no such path.
        """
        with self._one:
            run = self._found.get(run_id)
        if run is None:
            raise UnknownRunError(
                f"there is no simulation {run_id!r}; give the run_id that run_simulation returned"
            )
        if run.results is None:
            assert run.error
            raise UnknownRunError(
                f"simulation {run_id} failed, so that it has no results: {run.error['message']}"
            )
        if not paths:
            return run.results
        return {path: look_up(run.results, path) for path in paths}


def look_up(results: dict[str, Any], path: str) -> Any:
    """What lies at a dotted path.

    Raises:
        UnknownRunError: nothing does; the message says how far the path leads.
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
    """Numbers to as many digits as matter."""
    if isinstance(found, dict):
        return {name: rounded(value) for name, value in found.items()}
    return float(f"{found:.{DIGITS}g}") if isinstance(found, float) else found
