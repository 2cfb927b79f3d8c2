"""Streams: flows of a mixture in a state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from examples.process_agent.flowsheets.properties import Properties, State

SECONDS = 3600.0
"""kJ/h in a kW."""


@dataclass(frozen=True)
class Stream:
    """A flow of a mixture.

    Attributes:
        flow: kmol/h; 0 for an absent phase.
        zs: mole fractions, in the order of the flowsheet's components; zeros without flow.
        state: per mole; None without flow.
        T, P: K, bar.
    """

    flow: float
    zs: tuple[float, ...]
    state: State | None
    T: float
    P: float

    @classmethod
    def of(cls, flow: float, zs: Sequence[float], state: State) -> Stream:
        """Return a flow in a state."""
        return cls(flow, tuple(zs), state, state.T, state.P)

    @classmethod
    def empty(cls, n: int, T: float, P: float) -> Stream:
        """Return a stream of `n` components without flow."""
        return cls(0.0, (0.0,) * n, None, T, P)

    @property
    def power(self) -> float:
        """Enthalpy flow, kW."""
        return self.flow * self.state.h / SECONDS if self.state else 0.0

    def report(self, properties: Properties) -> dict[str, Any]:
        """Return its values by name; each name contains the unit of measure."""
        state = self.state
        return {
            "T_K": self.T,
            "P_bar": self.P,
            "flow_kmol_h": self.flow,
            "vapor_fraction": state.vapor_fraction if state else None,
            "enthalpy_kJ_kmol": state.h if state else None,
            "composition": dict(zip(properties.components, self.zs, strict=True)),
        }
