"""Flowsheets of components, feeds and units: validation, ordering and solution."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from examples.process_agent.flowsheets.column import Column
from examples.process_agent.flowsheets.errors import CyclicFlowsheetError, FlowsheetError, SimulationError
from examples.process_agent.flowsheets.properties import T_MAX_K, T_MIN_K, PackageName, Properties
from examples.process_agent.flowsheets.streams import Stream
from examples.process_agent.flowsheets.units import (
    Component,
    Compressor,
    Flash,
    Heater,
    Mixer,
    Name,
    Pressure,
    Pump,
    Unit,
)

UNITS: tuple[type[Unit], ...] = (Mixer, Heater, Pump, Flash, Column, Compressor)
AnyUnit = Annotated[Mixer | Heater | Pump | Flash | Column | Compressor, Field(discriminator="type")]
MAX_UNITS, MAX_COMPONENTS = 30, 12


class Feed(BaseModel):
    """An inlet stream of the flowsheet."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)
    T_K: Annotated[float, Field(ge=T_MIN_K, le=T_MAX_K)]
    P_bar: Pressure
    flow_kmol_h: Annotated[float, Field(gt=0, le=1e6)]
    composition: dict[Component, Annotated[float, Field(ge=0, le=1e6)]]
    """Mole fractions, or proportional amounts; components that are not listed are absent."""

    @model_validator(mode="after")
    def _something(self) -> Self:
        if sum(self.composition.values()) <= 0:
            raise ValueError("the composition is empty")
        return self


class Flowsheet(BaseModel):
    """A flowsheet.

    Raises:
        FlowsheetError: in `read`, if the flowsheet is malformed.
    """

    model_config = ConfigDict(extra="forbid")
    package: PackageName = "peng_robinson"
    components: Annotated[list[Component], Field(min_length=1, max_length=MAX_COMPONENTS)]
    feeds: Annotated[dict[Name, Feed], Field(min_length=1)]
    units: Annotated[dict[Name, AnyUnit], Field(min_length=1, max_length=MAX_UNITS)]

    @classmethod
    def read(cls, given: Any) -> Flowsheet:
        """Parse a flowsheet from JSON.

        Raises:
            FlowsheetError: a field is missing, unknown or wrong, or streams do not connect.
            CyclicFlowsheetError: units feed one another in a circle.
        """
        try:
            flowsheet = cls.model_validate(given)
        except ValidationError as error:
            raise FlowsheetError(_summary(error)) from None
        flowsheet._check_components()
        flowsheet.order()
        return flowsheet

    def _check_components(self) -> None:
        if len(set(self.components)) < len(self.components):
            raise FlowsheetError("a component is listed twice")
        for name, feed in self.feeds.items():
            if extra := sorted(set(feed.composition) - set(self.components)):
                raise FlowsheetError(
                    f"feed {name!r} holds {', '.join(extra)}, which components does not list"
                )

    def order(self) -> list[str]:
        """Return the names of the units, each after the units that feed it.

        Raises:
            FlowsheetError: a stream has no source, two sources, or two consumers.
            CyclicFlowsheetError: units feed one another in a circle.
        """
        self._check_streams()
        ready, left, ordered = set(self.feeds), dict(self.units), list[str]()
        while left:
            able = [name for name, unit in left.items() if ready.issuperset(unit.inlets)]
            if not able:
                circle = self._circle(left)
                raise CyclicFlowsheetError(
                    f"units feed one another in a circle: {' -> '.join(circle)}. Recycles are not solved; "
                    "break it, for example by giving the recycled stream as a feed"
                )
            for name in able:
                ready.update(left.pop(name).outlets)
            ordered += able
        return ordered

    def _check_streams(self) -> None:
        sources = dict.fromkeys(self.feeds, "the feeds")
        for name, unit in self.units.items():
            for stream in unit.outlets:
                if stream in sources:
                    raise FlowsheetError(
                        f"stream {stream!r} comes from {sources[stream]} and from {name}; give them "
                        "different names"
                    )
                sources[stream] = name
        takers: dict[str, str] = {}
        for name, unit in self.units.items():
            for stream in unit.inlets:
                if stream not in sources:
                    raise FlowsheetError(
                        f"{name} takes stream {stream!r}, which has no source; existing streams: "
                        f"{', '.join(sources)}"
                    )
                if stream in takers:
                    raise FlowsheetError(
                        f"stream {stream!r} goes to {takers[stream]} and to {name}; a stream can go to one "
                        "unit only"
                    )
                takers[stream] = name

    def _circle(self, left: Mapping[str, Unit]) -> list[str]:
        """Return units that feed one another in a circle, among the units that could not be ordered."""
        source = {stream: name for name, unit in left.items() for stream in unit.outlets}
        path = [next(iter(left))]
        while path.count(path[-1]) == 1:
            path.append(next(source[stream] for stream in left[path[-1]].inlets if stream in source))
        return path[path.index(path[-1]) :][::-1]

    def solve(self) -> dict[str, Any]:
        """Return the results of all streams and units: `{"streams": {name: {...}}, "units": {name: {...}}}`.

        Raises:
            SimulationError: the flowsheet cannot be solved; `unit` names the failed unit.
        """
        properties = Properties(self.package, self.components)
        streams: dict[str, Stream] = {}
        for name, feed in self.feeds.items():
            total = sum(feed.composition.values())
            zs = [feed.composition.get(component, 0.0) / total for component in self.components]
            try:
                streams[name] = Stream.of(feed.flow_kmol_h, zs, properties.at_TP(zs, feed.T_K, feed.P_bar))
            except SimulationError as error:
                error.unit = error.unit or name
                raise
        results: dict[str, dict[str, float]] = {}
        for name in self.order():
            unit = self.units[name]
            try:
                outlets, results[name] = unit.run(properties, [streams[inlet] for inlet in unit.inlets])
            except SimulationError as error:
                error.unit = error.unit or name
                raise
            streams.update(outlets)
        return {
            "streams": {name: stream.report(properties) for name, stream in streams.items()},
            "units": {name: {"type": self.units[name].type, **results[name]} for name in self.units},
        }


def _summary(error: ValidationError) -> str:
    """Describe the errors, one line per field."""
    parts = []
    for item in error.errors(include_url=False):
        tags = {unit.model_fields["type"].annotation.__args__[0] for unit in UNITS}  # type: ignore[union-attr]
        place = ".".join(str(part) for part in item["loc"] if part not in tags)
        parts.append(f"{place or 'flowsheet'}: {item['msg'].removeprefix('Value error, ')}")
    return "; ".join(parts)


def schema() -> dict[str, Any]:
    """Describe the flowsheet format: every unit type with its settings, units of measure, an example."""
    return {
        "units_of_measure": "K, bar (absolute), kmol/h, kW, mole fractions",
        "flowsheet": {
            "package": "peng_robinson (hydrocarbons, gases) | unifac (polar mixtures at low pressure)"
            " | ideal",
            "components": "list of names, such as propane, n-butane, ethanol, water",
            "feeds": "{name: {T_K, P_bar, flow_kmol_h, composition: {component: mole fraction}}}",
            "units": "{name: {type, ...}}; a stream is named by the unit that gives it, and goes to one unit "
            "at most; no recycles",
        },
        "unit_types": {unit.model_fields["type"].annotation.__args__[0]: unit.takes for unit in UNITS},  # type: ignore[union-attr]
        "results": {
            "streams.NAME": [
                "T_K",
                "P_bar",
                "flow_kmol_h",
                "vapor_fraction",
                "enthalpy_kJ_kmol",
                "composition.COMPONENT",
            ],
            "units.NAME": "as named for each unit type",
        },
        "example": {
            "package": "peng_robinson",
            "components": ["propane", "n-pentane"],
            "feeds": {
                "feed": {
                    "T_K": 300,
                    "P_bar": 5,
                    "flow_kmol_h": 50,
                    "composition": {"propane": 0.4, "n-pentane": 0.6},
                }
            },
            "units": {
                "drum": {
                    "type": "flash",
                    "inlet": "feed",
                    "vapor": "gas",
                    "liquid": "oil",
                    "T_K": 330,
                    "P_bar": 4,
                }
            },
        },
    }
