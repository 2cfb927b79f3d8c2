"""The shortcut distillation column: Fenske, Underwood, Gilliland.

Minimum stages by Fenske (Ind. Eng. Chem. 24, 1932, 482), minimum reflux by Underwood (Chem. Eng. Prog. 44,
1948, 603), stages at the actual reflux by Gilliland (Ind. Eng. Chem. 32, 1940, 1220) in Molokanov's form
(Int. Chem. Eng. 12, 1972, 209), the feed stage by Kirkbride (Petroleum Refiner 23, 1944, 87).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator
from scipy.optimize import brentq

from examples.process_agent.flowsheets.errors import NotConvergedError, UnitError
from examples.process_agent.flowsheets.properties import Properties, State
from examples.process_agent.flowsheets.streams import SECONDS, Stream
from examples.process_agent.flowsheets.units import Component, Name, Outcome, Pressure, Unit, _flowing

Recovery = Annotated[float, Field(ge=0.5, le=0.9999)]
TRACE = 1e-10
"""Smallest share of a component in either product, which keeps its volatility there defined."""
MAX_ITERATIONS = 60
MAX_EXPONENT = 500.0
"""Largest exponent; beyond it the distillate has all of a component."""


class Column(Unit):
    """Distils a stream with a total condenser and a partial reboiler."""

    takes = (
        "inlet, distillate, bottoms (the two outlets, both boiling liquids), light_key, heavy_key "
        "(component names, adjacent in volatility), light_key_recovery (share of it in the distillate, 0.5 "
        "to 0.9999), heavy_key_recovery (share of it in the bottoms), reflux_factor (reflux over the "
        "minimum reflux, above 1, default 1.3), P_bar (default: the inlet's). Results: min_stages, "
        "min_reflux, reflux, stages, feed_stage (from the top), condenser_duty_kW (negative), "
        "reboiler_duty_kW."
    )
    type: Literal["column"]
    inlet: Name
    distillate: Name
    bottoms: Name
    light_key: Component
    heavy_key: Component
    light_key_recovery: Recovery
    heavy_key_recovery: Recovery
    reflux_factor: float = Field(default=1.3, ge=1.01, le=20)
    P_bar: Pressure | None = None

    @property
    def outlets(self) -> list[str]:
        return [self.distillate, self.bottoms]

    @model_validator(mode="after")
    def _keys_differ(self) -> Self:
        if self.light_key == self.heavy_key:
            raise ValueError("light_key and heavy_key must be two components")
        return self

    def run(self, properties: Properties, inlets: list[Stream]) -> Outcome:
        (feed,) = inlets
        at_inlet, P = _flowing(feed), self.P_bar or feed.P
        light, heavy = self._keys(properties, feed)
        split = self._split(properties, feed, light, heavy, P)
        bubble, dew = properties.at_PVF(feed.zs, P, 0.0), properties.at_PVF(feed.zs, P, 1.0)
        quality = (dew.h - at_inlet.h) / (dew.h - bubble.h)
        min_reflux = minimum_reflux(split, feed.zs, light, heavy, quality)
        reflux = self.reflux_factor * min_reflux
        stages = gilliland(split.min_stages, min_reflux, reflux)
        top, bottom = split.streams(properties, feed, P)
        above = properties.at_PVF(top.zs, P, 1.0)
        assert top.state
        condenser = -(reflux + 1) * top.flow * (above.h - top.state.h) / SECONDS
        results = {
            "min_stages": split.min_stages,
            "min_reflux": min_reflux,
            "reflux": reflux,
            "stages": stages,
            "feed_stage": feed_stage(stages, feed.zs, top, bottom, light, heavy),
            "condenser_duty_kW": condenser,
            "reboiler_duty_kW": top.power + bottom.power - feed.power - condenser,
        }
        return {self.distillate: top, self.bottoms: bottom}, results

    def _keys(self, properties: Properties, feed: Stream) -> tuple[int, int]:
        """Indexes of the keys among the components."""
        for role, name in (("light_key", self.light_key), ("heavy_key", self.heavy_key)):
            if name not in properties.components:
                raise UnitError(
                    f"{role}={name!r} is not one of the flowsheet's components: "
                    f"{', '.join(properties.components)}"
                )
            if feed.zs[properties.components.index(name)] <= 0:
                raise UnitError(f"{role}={name!r} is not in the column's inlet")
        return properties.components.index(self.light_key), properties.components.index(self.heavy_key)

    def _split(self, properties: Properties, feed: Stream, light: int, heavy: int, P: float) -> Split:
        """Split of the components at total reflux, with the geometric mean of the volatilities of top and
        bottom."""
        volatilities = _volatilities(properties.at_PVF(feed.zs, P, 0.0), heavy)
        for _ in range(MAX_ITERATIONS):
            split = self._fenske(feed, volatilities, light, heavy, properties)
            top, bottom = split.compositions(feed)
            at_top = _volatilities(properties.at_PVF(top, P, 1.0), heavy)
            at_bottom = _volatilities(properties.at_PVF(bottom, P, 0.0), heavy)
            better = [
                math.sqrt(a * b) if z > 0 else 0.0 for a, b, z in zip(at_top, at_bottom, feed.zs, strict=True)
            ]
            if min(at_top[light], at_bottom[light]) <= 1.001:
                raise UnitError(
                    f"{self.light_key} is not more volatile than {self.heavy_key} all the way through the "
                    f"column (relative volatility {at_top[light]:.3f} at the top, {at_bottom[light]:.3f} at "
                    "the bottom): swap the keys, or the mixture has an azeotrope, which no recovery can pass"
                )
            change = max(abs(a - b) / b for a, b in zip(volatilities, better, strict=True) if b > 0)
            volatilities = better
            if change < 1e-10:
                return split
        raise NotConvergedError(
            "the volatilities of the column did not converge; ask for lower recoveries, or another pressure"
        )

    def _fenske(
        self, feed: Stream, volatilities: list[float], light: int, heavy: int, properties: Properties
    ) -> Split:
        if volatilities[light] <= 1:
            raise UnitError(
                f"{self.light_key} is less volatile than {self.heavy_key}; swap light_key and heavy_key"
            )
        for name, alpha in zip(properties.components, volatilities, strict=True):
            if 1 < alpha < volatilities[light]:
                raise UnitError(f"{name} boils between the keys; choose keys that are adjacent in volatility")
        odds_light = self.light_key_recovery / (1 - self.light_key_recovery)
        odds_heavy = (1 - self.heavy_key_recovery) / self.heavy_key_recovery
        min_stages = math.log(odds_light / odds_heavy) / math.log(volatilities[light])
        shares = []
        for alpha in volatilities:
            odds = (
                odds_heavy * math.exp(min(min_stages * math.log(alpha), MAX_EXPONENT)) if alpha > 0 else 0.0
            )
            shares.append(min(max(odds / (1 + odds), TRACE), 1 - TRACE))
        return Split(min_stages, volatilities, shares)


@dataclass(frozen=True)
class Split:
    """Split of the components at total reflux.

    Attributes:
        min_stages: equilibrium stages at total reflux, with the reboiler.
        volatilities: relative to the heavy key; 0 for an absent component.
        shares: share of each component in the distillate.
    """

    min_stages: float
    volatilities: list[float]
    shares: list[float]

    def flows(self, feed: Stream) -> tuple[list[float], list[float]]:
        """Flows of each component in distillate and bottoms, kmol/h."""
        moles = [feed.flow * z for z in feed.zs]
        top = [share * m for share, m in zip(self.shares, moles, strict=True)]
        return top, [m - t for m, t in zip(moles, top, strict=True)]

    def compositions(self, feed: Stream) -> tuple[list[float], list[float]]:
        """Mole fractions of distillate and bottoms."""
        top, bottom = self.flows(feed)
        return [t / sum(top) for t in top], [b / sum(bottom) for b in bottom]

    def streams(self, properties: Properties, feed: Stream, P: float) -> tuple[Stream, Stream]:
        """Distillate and bottoms, both at their bubble point."""
        made = []
        for flows in self.flows(feed):
            zs = [flow / sum(flows) for flow in flows]
            made.append(Stream.of(sum(flows), zs, properties.at_PVF(zs, P, 0.0)))
        return made[0], made[1]


def _volatilities(state: State, heavy: int) -> list[float]:
    """Volatilities relative to the heavy key in a state with two phases; 0 for an absent component."""
    if state.liquid is None or state.vapor is None:
        raise NotConvergedError(
            "the column's mixture does not have two phases at its pressure; choose a lower one"
        )
    ratios = [y / x if x > 0 else 0.0 for x, y in zip(state.liquid, state.vapor, strict=True)]
    return [ratio / ratios[heavy] for ratio in ratios]


def minimum_reflux(split: Split, zs: tuple[float, ...], light: int, heavy: int, quality: float) -> float:
    """Underwood's minimum reflux.

    Args:
        zs: mole fractions of the feed.
        quality: liquid share of the feed, by enthalpy; above 1 if it is subcooled, below 0 if it is
            superheated.

    Raises:
        UnitError: no reflux is needed.
        NotConvergedError: the equation has no root between the keys.
    """
    alphas = split.volatilities

    def excess(theta: float) -> float:
        return sum(a * z / (a - theta) for a, z in zip(alphas, zs, strict=True) if a > 0) - (1 - quality)

    gap = alphas[light] - 1
    try:
        theta = brentq(excess, 1 + 1e-9 * gap, alphas[light] - 1e-9 * gap, xtol=1e-14)
    except ValueError:
        raise NotConvergedError(
            "Underwood's equation has no root between the keys; check that the feed has enough of both"
        ) from None
    moles = [share * z for share, z in zip(split.shares, zs, strict=True)]
    found = sum(a * m / sum(moles) / (a - theta) for a, m in zip(alphas, moles, strict=True) if a > 0) - 1
    if found <= 0:
        raise UnitError("this separation needs no reflux; ask for higher recoveries, or use a flash")
    return found


def gilliland(min_stages: float, min_reflux: float, reflux: float) -> float:
    """Equilibrium stages at a reflux, including the reboiler, as a fraction."""
    x = (reflux - min_reflux) / (reflux + 1)
    y = 1 - math.exp((1 + 54.4 * x) / (11 + 117.2 * x) * (x - 1) / math.sqrt(x))
    return (min_stages + y) / (1 - y)


def feed_stage(
    stages: float, zs: tuple[float, ...], top: Stream, bottom: Stream, light: int, heavy: int
) -> float:
    """Kirkbride's feed stage, counted from the top."""
    ratio = (
        zs[heavy] / zs[light] * (bottom.zs[light] / top.zs[heavy]) ** 2 * bottom.flow / top.flow
    ) ** 0.206
    return stages * ratio / (1 + ratio)
