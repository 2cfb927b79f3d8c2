"""What the simulator refuses, and why. Each error has a code for programs and a sentence for people and models."""

from __future__ import annotations

from typing import Any

MAX_MESSAGE = 2000
"""Characters of what is told: it quotes what was sent, and a model has to read it."""


class SimulationError(Exception):
    """A flowsheet cannot be simulated.

    Args:
        message: what is wrong, and what to do.
        unit: the unit at which it went wrong; None if it is no unit's fault.
    """

    code = "simulation_error"

    def __init__(self, message: str, unit: str | None = None) -> None:
        super().__init__(message)
        self.unit = unit

    def told(self) -> dict[str, Any]:
        """As it goes over HTTP: `{"code", "message"}`, and `unit` where there is one."""
        return {"code": self.code, "message": str(self)[:MAX_MESSAGE]} | (
            {"unit": self.unit} if self.unit else {}
        )


class FlowsheetError(SimulationError):
    """The flowsheet is malformed: a field is missing or unknown, or a stream goes nowhere."""

    code = "bad_flowsheet"


class UnknownComponentError(SimulationError):
    """A component is not known, or the property package has no data for it."""

    code = "unknown_component"


class CyclicFlowsheetError(SimulationError):
    """Units feed one another in a circle."""

    code = "cyclic_flowsheet"


class NotConvergedError(SimulationError):
    """No state fulfils what a unit asks for, or the equations for it did not converge."""

    code = "not_converged"


class UnitError(SimulationError):
    """A unit is given what it cannot work with: vapour to a pump, two phases to a compressor."""

    code = "unit_not_applicable"


class UnknownRunError(SimulationError):
    """There is no simulation of this id, or no result under this path."""

    code = "unknown_result"
