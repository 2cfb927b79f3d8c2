"""Unit operations with their settings and equations. The distillation column is in `column.py`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from examples.process_agent.flowsheets.errors import UnitError
from examples.process_agent.flowsheets.properties import BAR, P_MAX_BAR, Properties
from examples.process_agent.flowsheets.streams import SECONDS, Stream

Name = Annotated[str, Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9_-]+$")]
Component = Annotated[str, Field(min_length=1, max_length=100)]
Pressure = Annotated[float, Field(gt=0, le=P_MAX_BAR)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Efficiency = Annotated[float, Field(gt=0, le=1)]
VAPOR_TOLERANCE = 1e-3
Outcome = tuple[dict[str, Stream], dict[str, float]]
"""Outlet streams by name, and the unit's own results by name."""


class Unit(BaseModel):
    """Base class of the unit operations. `run` takes the inlets in the order of `inlets`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    takes: ClassVar[str]
    """Inlets and outlets in one sentence; part of the schema that agents read."""

    @property
    def inlets(self) -> list[str]:
        """Names of the inlet streams."""
        return [self.inlet]  # type: ignore[attr-defined]

    @property
    def outlets(self) -> list[str]:
        """Names of the outlet streams."""
        return [self.outlet]  # type: ignore[attr-defined]

    def run(self, properties: Properties, inlets: list[Stream]) -> Outcome:
        """Compute the outlets.

        Raises:
            SimulationError: the unit cannot be computed.
        """
        raise NotImplementedError


class Mixer(Unit):
    """Mixes streams without heat or work, at the lowest of their pressures."""

    takes = "inlets (a list of 2 or more streams), outlet. Adiabatic, at the lowest pressure of the inlets."
    type: Literal["mixer"]
    inlets_: list[Name] = Field(alias="inlets", min_length=2)
    outlet: Name

    @property
    def inlets(self) -> list[str]:
        return list(self.inlets_)

    def run(self, properties: Properties, inlets: list[Stream]) -> Outcome:
        flowing = [stream for stream in inlets if stream.flow > 0]
        flow = sum(stream.flow for stream in flowing)
        if not flowing:
            raise UnitError("none of the mixer's inlets has any flow")
        zs = [sum(s.flow * s.zs[i] for s in flowing) / flow for i in range(len(properties.components))]
        P = min(stream.P for stream in flowing)
        h = sum(stream.power for stream in flowing) * SECONDS / flow
        return {self.outlet: Stream.of(flow, zs, properties.at_PH(zs, P, h))}, {}


class Heater(Unit):
    """Heats or cools (negative duty) a stream to a temperature, by a duty, or to a vapour fraction."""

    takes = (
        "inlet, outlet, one of outlet_T_K | duty_kW | outlet_vapor_fraction (0 bubble point, 1 dew point), "
        "pressure_drop_bar (default 0). Cools with a negative duty. Result: duty_kW."
    )
    type: Literal["heater"]
    inlet: Name
    outlet: Name
    outlet_T_K: float | None = None
    duty_kW: float | None = None
    outlet_vapor_fraction: Fraction | None = None
    pressure_drop_bar: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _one(self) -> Self:
        _exactly_one(self, "outlet_T_K", "duty_kW", "outlet_vapor_fraction")
        return self

    def run(self, properties: Properties, inlets: list[Stream]) -> Outcome:
        (feed,) = inlets
        state = _flowing(feed)
        P = feed.P - self.pressure_drop_bar
        if P <= 0:
            raise UnitError(
                f"a pressure drop of {self.pressure_drop_bar:g} bar leaves nothing of {feed.P:g} bar"
            )
        if self.outlet_T_K is not None:
            out = properties.at_TP(feed.zs, self.outlet_T_K, P)
        elif self.outlet_vapor_fraction is not None:
            out = properties.at_PVF(feed.zs, P, self.outlet_vapor_fraction)
        else:
            assert self.duty_kW is not None
            out = properties.at_PH(feed.zs, P, state.h + self.duty_kW * SECONDS / feed.flow)
        return {self.outlet: Stream.of(feed.flow, feed.zs, out)}, {
            "duty_kW": feed.flow * (out.h - state.h) / SECONDS
        }


class Pump(Unit):
    """Raises the pressure of a liquid; the work is its volume times the rise in pressure, over the
    efficiency."""

    takes = "inlet (liquid), outlet, outlet_P_bar, efficiency (0 to 1, default 0.75). Result: work_kW."
    type: Literal["pump"]
    inlet: Name
    outlet: Name
    outlet_P_bar: Pressure
    efficiency: Efficiency = 0.75

    def run(self, properties: Properties, inlets: list[Stream]) -> Outcome:
        (feed,) = inlets
        state = _flowing(feed)
        if state.vapor_fraction > VAPOR_TOLERANCE or state.liquid_volume is None:
            raise UnitError(
                f"a pump takes liquid, and {state.vapor_fraction:.1%} of its inlet is vapour; cool it, or "
                "flash it first"
            )
        if self.outlet_P_bar < feed.P:
            raise UnitError(
                f"a pump raises the pressure; its inlet has {feed.P:g} bar and "
                f"outlet_P_bar={self.outlet_P_bar:g}"
            )
        work = state.liquid_volume * (self.outlet_P_bar - feed.P) * BAR / self.efficiency
        out = properties.at_PH(feed.zs, self.outlet_P_bar, state.h + work)
        return {self.outlet: Stream.of(feed.flow, feed.zs, out)}, {"work_kW": feed.flow * work / SECONDS}


class Compressor(Unit):
    """Compresses a vapour; the work is the isentropic one over the efficiency."""

    takes = (
        "inlet (vapour), outlet, outlet_P_bar, efficiency (isentropic, 0 to 1, default 0.75). Results: "
        "work_kW, isentropic_T_K."
    )
    type: Literal["compressor"]
    inlet: Name
    outlet: Name
    outlet_P_bar: Pressure
    efficiency: Efficiency = 0.75

    def run(self, properties: Properties, inlets: list[Stream]) -> Outcome:
        (feed,) = inlets
        state = _flowing(feed)
        if state.vapor_fraction < 1 - VAPOR_TOLERANCE:
            raise UnitError(
                f"a compressor takes vapour, and {1 - state.vapor_fraction:.1%} of its inlet is liquid; heat "
                "it, or take the vapour of a flash"
            )
        if self.outlet_P_bar < feed.P:
            raise UnitError(
                f"a compressor raises the pressure; its inlet has {feed.P:g} bar and "
                f"outlet_P_bar={self.outlet_P_bar:g}"
            )
        ideal = properties.at_PS(feed.zs, self.outlet_P_bar, state.s)
        work = (ideal.h - state.h) / self.efficiency
        out = properties.at_PH(feed.zs, self.outlet_P_bar, state.h + work)
        results = {"work_kW": feed.flow * work / SECONDS, "isentropic_T_K": ideal.T}
        return {self.outlet: Stream.of(feed.flow, feed.zs, out)}, results


class Flash(Unit):
    """Separates a stream into vapour and liquid in equilibrium."""

    takes = (
        "inlet, vapor, liquid (the two outlets), one of T_K | vapor_fraction | duty_kW (0 is adiabatic), "
        "P_bar (default: the inlet's). Result: duty_kW."
    )
    type: Literal["flash"]
    inlet: Name
    vapor: Name
    liquid: Name
    T_K: float | None = None
    vapor_fraction: Fraction | None = None
    duty_kW: float | None = None
    P_bar: Pressure | None = None

    @property
    def outlets(self) -> list[str]:
        return [self.vapor, self.liquid]

    @model_validator(mode="after")
    def _one(self) -> Self:
        _exactly_one(self, "T_K", "vapor_fraction", "duty_kW")
        return self

    def run(self, properties: Properties, inlets: list[Stream]) -> Outcome:
        (feed,) = inlets
        state, P = _flowing(feed), self.P_bar or feed.P
        if self.T_K is not None:
            out = properties.at_TP(feed.zs, self.T_K, P)
        elif self.vapor_fraction is not None:
            out = properties.at_PVF(feed.zs, P, self.vapor_fraction)
        else:
            assert self.duty_kW is not None
            out = properties.at_PH(feed.zs, P, state.h + self.duty_kW * SECONDS / feed.flow)
        rising, n = feed.flow * out.vapor_fraction, len(feed.zs)
        streams = {}
        for name, flow, zs, at in (
            (self.vapor, rising, out.vapor, 1.0),
            (self.liquid, feed.flow - rising, out.liquid, 0.0),
        ):
            if flow <= 0 or zs is None:
                streams[name] = Stream.empty(n, out.T, P)
            else:
                phase = out if out.vapor_fraction == at else properties.at_PVF(zs, P, at)
                streams[name] = Stream.of(flow, zs, phase)
        duty = feed.flow * (out.h - state.h) / SECONDS
        return streams, {"duty_kW": duty, "vapor_fraction": out.vapor_fraction, "T_K": out.T}


def _flowing(feed: Stream) -> Any:
    """Return the state of an inlet.

    Raises:
        UnitError: the inlet has no flow.
    """
    if feed.state is None:
        raise UnitError(
            "its inlet has no flow: the unit before found no such phase. Change the conditions there"
        )
    return feed.state


def _exactly_one(unit: BaseModel, *names: str) -> None:
    given = [name for name in names if getattr(unit, name) is not None]
    if len(given) != 1:
        raise ValueError(f"give exactly one of {', '.join(names)}; {' and '.join(given) or 'none'} given")
