"""Property packages: states of mixtures from `thermo`'s phase equilibria.

Units in the whole simulator: K, bar, kmol/h, kW, kJ/kmol (which is J/mol). Enthalpies are of formation-free
ideal gas at 298.15 K, thermo's reference.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from chemicals import CAS_from_any
from scipy.optimize import brentq
from thermo import (
    PRMIX,
    UNIFAC,
    CEOSGas,
    CEOSLiquid,
    ChemicalConstantsPackage,
    FlashPureVLS,
    FlashVL,
    GibbsExcessLiquid,
    IdealGas,
)
from thermo.interaction_parameters import IPDB

from examples.process_agent.flowsheets.errors import NotConvergedError, UnknownComponentError

PackageName = Literal["peng_robinson", "ideal", "unifac"]
PACKAGES = get_args(PackageName)
BAR = 1e5
"""Pascals of a bar."""
T_MIN_K, T_MAX_K = 120.0, 1500.0
"""Range of temperatures in which states are searched."""
P_MAX_BAR = 500.0
KNOWN = (
    "methane",
    "ethane",
    "propane",
    "n-butane",
    "isobutane",
    "n-pentane",
    "isopentane",
    "n-hexane",
    "n-heptane",
    "n-octane",
    "ethylene",
    "propylene",
    "cyclohexane",
    "benzene",
    "toluene",
    "p-xylene",
    "ethylbenzene",
    "styrene",
    "methanol",
    "ethanol",
    "1-propanol",
    "2-propanol",
    "1-butanol",
    "acetone",
    "acetic acid",
    "ethyl acetate",
    "water",
    "ammonia",
    "nitrogen",
    "oxygen",
    "hydrogen",
    "carbon dioxide",
    "carbon monoxide",
    "hydrogen sulfide",
)
"""Names that errors suggest. Every name of the `chemicals` library is valid."""


@dataclass(frozen=True)
class State:
    """An equilibrium state of one mole of a mixture.

    Attributes:
        T, P: K, bar.
        vapor_fraction: molar; 0 liquid, 1 vapour.
        h, s: J/mol, J/mol/K.
        liquid, vapor: mole fractions of the phases, in the order of the components; None for an absent phase.
    """

    T: float
    P: float
    vapor_fraction: float
    h: float
    s: float
    liquid: tuple[float, ...] | None
    vapor: tuple[float, ...] | None
    liquid_volume: float | None
    """Molar volume of the liquid phase, m3/mol; None without a liquid phase."""


class Properties:
    """States of mixtures of the given components.

    Args:
        package: `peng_robinson` (with ChemSep's interaction parameters), `ideal` (Raoult's law and ideal gas)
            or `unifac` (the original UNIFAC for the liquid, ideal gas).
        components: names.

    Raises:
        UnknownComponentError: a component is unknown, or the package has no data for it.
    """

    def __init__(self, package: PackageName, components: Sequence[str]) -> None:
        self.package: PackageName = package
        self.components = tuple(components)
        self._ids = tuple(cas_of(name) for name in components)

    def at_TP(self, zs: Sequence[float], T: float, P: float) -> State:
        """Return the state at a temperature and a pressure."""
        return self._solve(
            zs, f"T={T:g} K, P={P:g} bar", P, lambda flasher, z: flasher.flash(T=T, P=P * BAR, zs=z), T
        )

    def at_PVF(self, zs: Sequence[float], P: float, vapor_fraction: float) -> State:
        """Return the state with a vapour fraction at a pressure: 0 is the bubble point, 1 the dew point."""
        what = f"vapor fraction {vapor_fraction:g} at {P:g} bar"
        return self._solve(zs, what, P, lambda flasher, z: flasher.flash(P=P * BAR, VF=vapor_fraction, zs=z))

    def at_PH(self, zs: Sequence[float], P: float, h: float) -> State:
        """Return the state with an enthalpy (J/mol) at a pressure."""
        return self._at_content(zs, P, "h", h, f"an enthalpy of {h:.0f} J/mol at {P:g} bar")

    def at_PS(self, zs: Sequence[float], P: float, s: float) -> State:
        """Return the state with an entropy (J/mol/K) at a pressure."""
        return self._at_content(zs, P, "s", s, f"an entropy of {s:.1f} J/mol/K at {P:g} bar")

    def _at_content(
        self, zs: Sequence[float], P: float, of: Literal["h", "s"], wanted: float, what: str
    ) -> State:
        """Return the state with a given `h` or `s`, which grow with the temperature.

        The search is over flashes at fixed temperature and pressure, which converge where thermo's flashes at
        fixed enthalpy do not (activity models). For a pure component, which boils at one temperature, the
        search is over the vapour fraction.
        """
        if len(_active(zs)) == 1 and (boiling := self._boiling(zs, P)) is not None:
            liquid, vapor = boiling
            low, high = getattr(liquid, of), getattr(vapor, of)
            if low <= wanted <= high:
                return _between(liquid, vapor, (wanted - low) / (high - low))

        def excess(T: float) -> float:
            return getattr(self.at_TP(zs, T, P), of) - wanted

        low, high = self._range(zs, P)
        try:
            T = brentq(excess, low, high, xtol=1e-9, rtol=1e-13)
        except ValueError:
            raise NotConvergedError(
                f"no state has {what} between {low:.0f} and {high:.0f} K; reduce the heating or cooling"
            ) from None
        return self.at_TP(zs, T, P)

    def _range(self, zs: Sequence[float], P: float) -> tuple[float, float]:
        """Range of temperatures in which states can be computed at a pressure; some equations of state fail
        far from it."""
        low, high = T_MIN_K, T_MAX_K
        while low < 300.0 and not self._computes(zs, low, P):
            low += 20.0
        while high > 400.0 and not self._computes(zs, high, P):
            high -= 100.0
        return low, high

    def _computes(self, zs: Sequence[float], T: float, P: float) -> bool:
        try:
            self.at_TP(zs, T, P)
        except NotConvergedError:
            return False
        return True

    def _boiling(self, zs: Sequence[float], P: float) -> tuple[State, State] | None:
        """Bubble and dew point of a pure component; None above its critical pressure."""
        try:
            return self.at_PVF(zs, P, 0.0), self.at_PVF(zs, P, 1.0)
        except NotConvergedError:
            return None

    def _solve(
        self,
        zs: Sequence[float],
        what: str,
        P: float,
        flash: Callable[[Any, list[float]], Any],
        T: float | None = None,
    ) -> State:
        """Flash with the present components, and return the state over all components."""
        if not 0 < P <= P_MAX_BAR:
            raise NotConvergedError(
                f"a pressure of {P:g} bar is out of range; it must be above 0 and at most {P_MAX_BAR:g} bar"
            )
        if T is not None and not T_MIN_K <= T <= T_MAX_K:
            raise NotConvergedError(
                f"a temperature of {T:g} K is out of range; it must be from {T_MIN_K:g} to {T_MAX_K:g} K"
            )
        active = _active(zs)
        flasher = make_flasher(
            self.package, tuple(self._ids[i] for i in active), tuple(self.components[i] for i in active)
        )
        part = [zs[i] for i in active]
        try:
            found = flash(flasher, [z / sum(part) for z in part])
            h, s = found.H(), found.S()
            if not (math.isfinite(h) and math.isfinite(s) and math.isfinite(found.T)):
                raise ArithmeticError("no finite state")
        except Exception as error:  # thermo raises any error of its solvers
            raise NotConvergedError(
                f"the phase equilibrium did not converge for {what} ({self.package}; "
                f"{type(error).__name__}). Choose conditions in which the mixture has such a state"
            ) from error
        liquid, gas = found.liquid0 if found.liquid_count else None, found.gas
        return State(
            T=float(found.T),
            P=float(found.P) / BAR,
            vapor_fraction=float(found.VF),
            h=float(h),
            s=float(s),
            liquid=self._spread(active, liquid),
            vapor=self._spread(active, gas),
            liquid_volume=None if liquid is None else float(liquid.V()),
        )

    def _spread(self, active: list[int], phase: Any) -> tuple[float, ...] | None:
        """Mole fractions over all components; absent ones get 0."""
        if phase is None:
            return None
        found = dict(zip(active, phase.zs, strict=True))
        return tuple(float(found.get(i, 0.0)) for i in range(len(self.components)))


def _active(zs: Sequence[float]) -> list[int]:
    return [i for i, z in enumerate(zs) if z > 0]


def _between(liquid: State, vapor: State, fraction: float) -> State:
    """State of a boiling pure component with a vapour fraction."""
    return State(
        T=liquid.T,
        P=liquid.P,
        vapor_fraction=fraction,
        h=liquid.h + fraction * (vapor.h - liquid.h),
        s=liquid.s + fraction * (vapor.s - liquid.s),
        liquid=liquid.liquid,
        vapor=vapor.vapor,
        liquid_volume=liquid.liquid_volume,
    )


@functools.cache
def cas_of(name: str) -> str:
    """Return the CAS number of a component.

    Raises:
        UnknownComponentError: the `chemicals` library has no component with this name.
    """
    try:
        return CAS_from_any(name)
    except (ValueError, IndexError):
        near = difflib.get_close_matches(name.lower(), KNOWN, 3, 0.7)
        hint = f"did you mean {', '.join(near)}?" if near else f"known are for example {', '.join(KNOWN[:8])}"
        raise UnknownComponentError(f"there is no component {name!r}; {hint}") from None


@functools.lru_cache(maxsize=256)
def make_flasher(package: PackageName, ids: tuple[str, ...], names: tuple[str, ...]) -> Any:
    """Return thermo's flash object for components.

    Raises:
        UnknownComponentError: the package has no data for a component.
    """
    constants, correlations = ChemicalConstantsPackage.from_IDs(list(ids))
    for i, name in enumerate(names):
        if any(values[i] is None for values in (constants.Tcs, constants.Pcs, constants.omegas)):
            raise UnknownComponentError(
                f"{name!r} has no critical constants, which every package needs; choose another component"
            )
    make = {"peng_robinson": _cubic, "ideal": _activity, "unifac": _activity}[package]
    gas, liquid = make(package, constants, correlations, names)
    if len(ids) == 1:
        return FlashPureVLS(constants, correlations, gas=gas, liquids=[liquid], solids=[])
    return FlashVL(constants, correlations, gas=gas, liquid=liquid)


def _cubic(package: str, constants: Any, correlations: Any, names: tuple[str, ...]) -> tuple[Any, Any]:
    kijs = IPDB.get_ip_asymmetric_matrix("ChemSep PR", constants.CASs, "kij")
    eos = {"Tcs": constants.Tcs, "Pcs": constants.Pcs, "omegas": constants.omegas, "kijs": kijs}
    heat = correlations.HeatCapacityGases
    return CEOSGas(PRMIX, eos_kwargs=eos, HeatCapacityGases=heat), CEOSLiquid(
        PRMIX, eos_kwargs=eos, HeatCapacityGases=heat
    )


def _activity(package: str, constants: Any, correlations: Any, names: tuple[str, ...]) -> tuple[Any, Any]:
    model = None
    if package == "unifac" and len(names) > 1:
        for name, groups in zip(names, constants.UNIFAC_groups, strict=True):
            if not groups:
                raise UnknownComponentError(
                    f"UNIFAC has no groups for {name!r}; use the package ideal or peng_robinson"
                )
        even = [1.0 / len(names)] * len(names)
        model = UNIFAC.from_subgroups(T=298.15, xs=even, chemgroups=constants.UNIFAC_groups)
    liquid = GibbsExcessLiquid(
        VaporPressures=correlations.VaporPressures,
        HeatCapacityGases=correlations.HeatCapacityGases,
        VolumeLiquids=correlations.VolumeLiquids,
        EnthalpyVaporizations=correlations.EnthalpyVaporizations,
        GibbsExcessModel=model,
        equilibrium_basis="Psat",
        caloric_basis="Psat",
    )
    return IdealGas(HeatCapacityGases=correlations.HeatCapacityGases), liquid
