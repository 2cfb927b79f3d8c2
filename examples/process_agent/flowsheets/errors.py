"""Errors of the simulator. Each has a code for programs and a message for people and models."""

from __future__ import annotations

from typing import Any

MAX_MESSAGE = 2000
"""Maximum length of a message: it quotes the input, and a model has to read it."""


class SimulationError(Exception):
    """A flowsheet cannot be simulated.

    Args:
        message: what is wrong, and what to do.
        unit: the unit that failed; None if no unit did.
    """

    code = "simulation_error"

    def __init__(self, message: str, unit: str | None = None) -> None:
        super().__init__(message)
        self.unit = unit

    def as_json(self) -> dict[str, Any]:
        """The error as JSON: `{"code", "message"}`, and `unit` if there is one."""
        return {"code": self.code, "message": str(self)[:MAX_MESSAGE]} | (
            {"unit": self.unit} if self.unit else {}
        )


class FlowsheetError(SimulationError):
    """The flowsheet is malformed: a field is missing or unknown, or a stream is not connected."""

    code = "bad_flowsheet"


class UnknownComponentError(SimulationError):
    """A component is unknown, or the property package has no data for it."""

    code = "unknown_component"


class CyclicFlowsheetError(SimulationError):
    """Units feed one another in a circle."""

    code = "cyclic_flowsheet"


class NotConvergedError(SimulationError):
    """No state satisfies the settings of a unit, or its equations did not converge."""

    code = "not_converged"


class UnitError(SimulationError):
    """A unit has an unsuitable inlet: vapour in a pump, two phases in a compressor."""

    code = "unit_not_applicable"


class UnknownRunError(SimulationError):
    """No simulation has this id, or it has no result under this path."""

    code = "unknown_result"
