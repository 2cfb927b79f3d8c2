"""The process simulator: results against balances, tables and closed forms; errors over HTTP."""

import contextlib
import json
import math
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("thermo")

from examples.process_agent.flowsheets.column import Split, gilliland, minimum_reflux
from examples.process_agent.flowsheets.errors import NotConvergedError, SimulationError
from examples.process_agent.flowsheets.local import SimulatorUnavailableError, simulator
from examples.process_agent.flowsheets.model import Flowsheet, schema
from examples.process_agent.flowsheets.properties import Properties

pytestmark = pytest.mark.framework("thermo")
LPG = {"propane": 0.3, "n-butane": 0.3, "n-pentane": 0.2, "n-hexane": 0.2}
GAS_CONSTANT = 8.314462618


def solve(units: dict[str, Any], package: str = "peng_robinson", **feeds: Any) -> dict[str, Any]:
    components = list(dict.fromkeys(name for feed in feeds.values() for name in feed["composition"]))
    return Flowsheet.read(
        {"package": package, "components": components, "feeds": feeds, "units": units}
    ).solve()


def feed(flow: float, T: float, P: float, composition: dict[str, float]) -> dict[str, Any]:
    return {"flow_kmol_h": flow, "T_K": T, "P_bar": P, "composition": composition}


# properties


@pytest.mark.parametrize(
    ("name", "boils_at_K"),
    [("n-hexane", 341.87), ("benzene", 353.24), ("propane", 231.04), ("water", 373.15)],
)
@pytest.mark.parametrize("package", ["ideal", "peng_robinson"])
def test_pure_components_boil_where_tables_say(name: str, boils_at_K: float, package: Any) -> None:
    tolerance = 2.5 if package == "peng_robinson" else 0.6
    assert (
        pytest.approx(boils_at_K, abs=tolerance) == Properties(package, [name]).at_PVF([1.0], 1.01325, 0.5).T
    )


def test_unifac_knows_the_azeotrope_of_ethanol_and_water() -> None:
    """At 1.01325 bar it is at 0.89 mole fraction of ethanol and 351.3 K."""
    properties = Properties("unifac", ["ethanol", "water"])

    def richer(x: float) -> float:
        state = properties.at_PVF([x, 1 - x], 1.01325, 0.0)
        assert state.vapor
        return state.vapor[0] - x

    assert richer(0.8) > 0 > richer(0.95)
    assert pytest.approx(351.3, abs=0.6) == properties.at_PVF([0.89, 0.11], 1.01325, 0.0).T


@given(h=st.floats(-20000, 20000), P=st.floats(0.5, 15))
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("package", ["peng_robinson", "unifac", "ideal"])
def test_enthalpy_leads_back_to_the_state(package: Any, h: float, P: float) -> None:
    zs = [0.3, 0.3, 0.4]
    properties = Properties(package, ["n-butane", "n-pentane", "n-hexane"])
    state = properties.at_PH(zs, P, h)
    assert state.h == pytest.approx(h, abs=0.01)
    again = properties.at_TP(zs, state.T, P)
    assert again.vapor_fraction == pytest.approx(state.vapor_fraction, abs=1e-6)


def test_a_boiling_pure_component_is_found_by_its_enthalpy() -> None:
    properties = Properties("peng_robinson", ["propane", "n-hexane"])
    boiling = properties.at_PVF([1.0, 0.0], 4.0, 0.37)
    found = properties.at_PH([1.0, 0.0], 4.0, boiling.h)
    assert (found.T, found.vapor_fraction) == (pytest.approx(boiling.T), pytest.approx(0.37))
    assert found.vapor == (1.0, 0.0)


# units


def balances(results: dict[str, Any], inlets: list[str], outlets: list[str], power_kW: float) -> None:
    """Assert the balances of energy and of the moles of each component."""
    streams = results["streams"]

    def total(names: list[str], value: Any) -> float:
        return sum(
            streams[n]["flow_kmol_h"] * value(streams[n]) for n in names if streams[n]["flow_kmol_h"] > 0
        )

    for component in streams[inlets[0]]["composition"]:

        def fraction(stream: dict[str, Any], name: str = component) -> float:
            return stream["composition"][name]

        assert total(outlets, fraction) == pytest.approx(total(inlets, fraction), rel=1e-6, abs=1e-6)
    before, after = (total(names, lambda s: s["enthalpy_kJ_kmol"]) / 3600 for names in (inlets, outlets))
    assert after - before == pytest.approx(power_kW, rel=1e-6, abs=1e-4)


def test_a_flash_and_a_mixer_balance() -> None:
    units = {
        "drum": {"type": "flash", "inlet": "feed", "vapor": "gas", "liquid": "oil", "T_K": 320, "P_bar": 4},
        "mixer": {"type": "mixer", "inlets": ["gas", "oil"], "outlet": "again"},
    }
    results = solve(units, feed=feed(100, 300, 6, LPG))
    gas, oil = results["streams"]["gas"], results["streams"]["oil"]
    assert 0 < gas["flow_kmol_h"] < 100
    assert (gas["vapor_fraction"], oil["vapor_fraction"]) == (1.0, 0.0)
    assert gas["composition"]["propane"] > 0.3 > oil["composition"]["propane"]
    balances(results, ["feed"], ["gas", "oil"], results["units"]["drum"]["duty_kW"])
    assert results["streams"]["again"]["T_K"] == pytest.approx(320, abs=1e-4)  # separated and mixed again


def test_an_adiabatic_flash_takes_no_duty() -> None:
    units = {
        "drum": {"type": "flash", "inlet": "feed", "vapor": "gas", "liquid": "oil", "duty_kW": 0, "P_bar": 2}
    }
    results = solve(units, feed=feed(100, 300, 12, LPG))
    assert results["units"]["drum"]["T_K"] < 300
    balances(results, ["feed"], ["gas", "oil"], 0.0)


def test_a_heater_by_each_of_its_settings_is_one() -> None:
    by_temperature = solve(
        {"h": {"type": "heater", "inlet": "feed", "outlet": "hot", "outlet_T_K": 345}},
        feed=feed(100, 300, 8, LPG),
    )
    duty = by_temperature["units"]["h"]["duty_kW"]
    fraction = by_temperature["streams"]["hot"]["vapor_fraction"]
    for setting in ({"duty_kW": duty}, {"outlet_vapor_fraction": fraction}):
        results = solve(
            {"h": {"type": "heater", "inlet": "feed", "outlet": "hot", **setting}},
            feed=feed(100, 300, 8, LPG),
        )
        assert results["streams"]["hot"]["T_K"] == pytest.approx(345, abs=1e-3)
        assert results["units"]["h"]["duty_kW"] == pytest.approx(duty, rel=1e-5)


def test_a_pump_takes_volume_times_pressure() -> None:
    """n-Hexane at 298 K: 131 cm3/mol; Peng-Robinson is within 5% of that."""
    results = solve(
        {"p": {"type": "pump", "inlet": "feed", "outlet": "high", "outlet_P_bar": 21, "efficiency": 0.8}},
        feed=feed(360, 298, 1, {"n-hexane": 1}),
    )
    by_hand = 0.1 * 131e-6 * 20e5 / 0.8  # kW: kmol/s, m3/mol, Pa
    assert results["units"]["p"]["work_kW"] == pytest.approx(by_hand, rel=0.05)
    balances(results, ["feed"], ["high"], results["units"]["p"]["work_kW"])


def test_a_compressor_of_an_ideal_gas_follows_the_adiabatic_law() -> None:
    """For nitrogen, cp is 7/2 R and T2 / T1 = (P2 / P1)^(2/7), up to changes of cp with temperature."""
    results = solve(
        {
            "c": {
                "type": "compressor",
                "inlet": "feed",
                "outlet": "high",
                "outlet_P_bar": 4,
                "efficiency": 0.75,
            }
        },
        "ideal",
        feed=feed(360, 300, 1, {"nitrogen": 1}),
    )
    ideal_K = 300 * 4 ** (2 / 7)
    assert results["units"]["c"]["isentropic_T_K"] == pytest.approx(ideal_K, rel=3e-3)
    work_kW = 100 * 3.5 * GAS_CONSTANT * (ideal_K - 300) / 0.75 / 1000
    assert results["units"]["c"]["work_kW"] == pytest.approx(work_kW, rel=5e-3)
    balances(results, ["feed"], ["high"], results["units"]["c"]["work_kW"])


def test_a_column_recovers_its_keys_and_balances() -> None:
    column = {
        "type": "column",
        "inlet": "feed",
        "distillate": "top",
        "bottoms": "bottom",
        "light_key": "propane",
        "heavy_key": "n-butane",
        "light_key_recovery": 0.98,
        "heavy_key_recovery": 0.97,
        "P_bar": 15,
    }
    results = solve({"c": column}, feed=feed(100, 340, 15, LPG))
    top, bottom, found = results["streams"]["top"], results["streams"]["bottom"], results["units"]["c"]
    assert top["flow_kmol_h"] * top["composition"]["propane"] == pytest.approx(0.98 * 30)
    assert bottom["flow_kmol_h"] * bottom["composition"]["n-butane"] == pytest.approx(0.97 * 30)
    assert found["stages"] > found["min_stages"] > 5
    assert found["reflux"] == pytest.approx(1.3 * found["min_reflux"])
    assert found["condenser_duty_kW"] < 0 < found["reboiler_duty_kW"]
    balances(results, ["feed"], ["top", "bottom"], found["condenser_duty_kW"] + found["reboiler_duty_kW"])


@given(
    alpha=st.floats(1.2, 5),
    z=st.floats(0.1, 0.9),
    recovery=st.floats(0.9, 0.999),
    quality=st.floats(0.0, 1.0),
)
def test_minimum_reflux_of_a_binary_is_that_of_the_closed_form(
    alpha: float, z: float, recovery: float, quality: float
) -> None:
    """The operating line touches y = a x / (1 + (a - 1) x) at its intersection with the q-line."""
    shares = [recovery, 1 - recovery]
    split = Split(1.0, [alpha, 1.0], shares)
    x_top = recovery * z / (recovery * z + (1 - recovery) * (1 - z))
    if quality == 1.0:
        x = z
    else:  # q x/(q-1) - z/(q-1) = a x/(1+(a-1)x), a quadratic equation
        a, b, c = quality * (alpha - 1), quality + alpha * (1 - quality) - (alpha - 1) * z, -z
        x = -c / b if abs(a) < 1e-9 else (-b + math.sqrt(b * b - 4 * a * c)) / (2 * a)
    y = alpha * x / (1 + (alpha - 1) * x)
    by_hand = (x_top - y) / (y - x)
    assume(by_hand > 0.01)
    assert minimum_reflux(split, (z, 1 - z), 0, 1, quality) == pytest.approx(by_hand, rel=1e-4)


@given(min_stages=st.floats(3, 40), min_reflux=st.floats(0.2, 10))
def test_gilliland_lies_between_minimum_stages_and_infinity(min_stages: float, min_reflux: float) -> None:
    refluxes = [min_reflux * factor for factor in (1.02, 1.2, 1.5, 3.0, 1e5)]
    stages = [gilliland(min_stages, min_reflux, reflux) for reflux in refluxes]
    assert stages == sorted(stages, reverse=True)
    assert stages[-1] == pytest.approx(min_stages, rel=1e-2)
    assert (
        1.5 * min_stages < stages[2] < 3.2 * min_stages + 3
    )  # about twice the minimum, a rule of thumb in design


# rejected requests

GOOD = {"type": "flash", "inlet": "feed", "vapor": "gas", "liquid": "oil", "T_K": 320, "P_bar": 4}
HEATER = {"type": "heater", "inlet": "feed", "outlet": "hot"}
COLUMN = {
    "type": "column",
    "inlet": "feed",
    "distillate": "top",
    "bottoms": "bottom",
    "light_key": "propane",
    "heavy_key": "n-butane",
    "light_key_recovery": 0.98,
    "heavy_key_recovery": 0.97,
}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    ("bad_flowsheet", {"drum": GOOD | {"type": "reactor"}}, "", "reactor"),
    ("bad_flowsheet", {"drum": GOOD | {"speed": 3}}, "", "units.drum.speed"),
    (
        "bad_flowsheet",
        {"drum": GOOD | {"vapor_fraction": 0.5}},
        "",
        "give exactly one of T_K, vapor_fraction, duty_kW",
    ),
    (
        "bad_flowsheet",
        {"drum": GOOD | {"inlet": "nowhere"}},
        "",
        "takes stream 'nowhere', which has no source",
    ),
    ("bad_flowsheet", {"drum": GOOD, "h": HEATER | {"duty_kW": 1}}, "", "a stream can go to one unit only"),
    ("bad_flowsheet", {"drum": GOOD | {"liquid": "gas"}}, "", "stream 'gas' comes from drum and from drum"),
    (
        "cyclic_flowsheet",
        {
            "m": {"type": "mixer", "inlets": ["feed", "oil"], "outlet": "mixed"},
            "drum": GOOD | {"inlet": "mixed"},
        },
        "",
        "m -> drum -> m",
    ),
    ("not_converged", {"h": HEATER | {"duty_kW": 1e7}}, "h", "reduce the heating or cooling"),
    ("not_converged", {"h": HEATER | {"duty_kW": -1e7}}, "h", "reduce the heating or cooling"),
    ("not_converged", {"h": HEATER | {"outlet_T_K": 5000}}, "h", "out of range"),
    (
        "not_converged",
        {"drum": GOOD | {"T_K": None, "vapor_fraction": 0.5, "P_bar": 200}},
        "drum",
        "did not converge",
    ),
    (
        "unit_not_applicable",
        {"p": {"type": "pump", "inlet": "feed", "outlet": "o", "outlet_P_bar": 3}},
        "p",
        "raises the pressure",
    ),
    (
        "unit_not_applicable",
        {"c": {"type": "compressor", "inlet": "feed", "outlet": "o", "outlet_P_bar": 30}},
        "c",
        "is liquid",
    ),
    (
        "unit_not_applicable",
        {
            "drum": GOOD | {"T_K": 200},
            "c": {"type": "compressor", "inlet": "gas", "outlet": "o", "outlet_P_bar": 30},
        },
        "c",
        "its inlet has no flow",
    ),
    (
        "unit_not_applicable",
        {"c": COLUMN | {"light_key": "water"}},
        "c",
        "is not one of the flowsheet's components",
    ),
    (
        "unit_not_applicable",
        {"c": COLUMN | {"light_key": "n-butane", "heavy_key": "propane"}},
        "c",
        "swap light_key and heavy_key",
    ),
    (
        "unit_not_applicable",
        {"c": COLUMN | {"heavy_key": "n-pentane"}},
        "c",
        "n-butane boils between the keys",
    ),
]


@pytest.mark.parametrize(
    ("code", "units", "unit", "says"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_impossible_simulations_are_reported(code: str, units: dict[str, Any], unit: str, says: str) -> None:
    with pytest.raises(SimulationError) as raised:
        solve(units, feed=feed(100, 300, 8, LPG))
    assert raised.value.code == code
    assert (raised.value.unit or "") == unit
    assert says in str(raised.value)


def test_no_column_separates_beyond_an_azeotrope() -> None:
    column = COLUMN | {"light_key": "ethanol", "heavy_key": "water"}
    with pytest.raises(SimulationError, match="azeotrope"):
        solve({"c": column}, "unifac", feed=feed(10, 340, 1, {"ethanol": 0.3, "water": 0.7}))


def test_unknown_components_get_a_suggestion() -> None:
    with pytest.raises(SimulationError, match=r"no component 'buthane-x'") as raised:
        solve({"drum": GOOD}, feed=feed(10, 340, 1, {"buthane-x": 1}))
    assert raised.value.code == "unknown_component"
    with pytest.raises(SimulationError, match=r"did you mean .*cyclohexane"):
        solve({"drum": GOOD}, feed=feed(10, 340, 1, {"cyclohexan3": 1}))


def test_pressure_out_of_range_is_no_crash_of_a_library() -> None:
    with pytest.raises(NotConvergedError, match="out of range"):
        Properties("ideal", ["water"]).at_TP([1.0], 300, -1)


def random_flowsheet(chance: random.Random) -> dict[str, Any]:
    """Return units in series with settings from sensible to absurd."""
    of = chance.choice
    components = chance.sample(
        ["methane", "propane", "n-butane", "ethanol", "water", "nitrogen", "hydrogen", "benzene"],
        of([1, 2, 4]),
    )
    share = {name: of([0, 1e-8, 0.5, 1]) for name in components}
    units: dict[str, Any] = {}
    inlet = "feed"
    for i in range(of([1, 2, 3])):
        setting = of(
            [
                {"duty_kW": of([-1e4, 0, 100])},
                {"vapor_fraction": of([0, 0.4, 1])},
                {"T_K": of([125, 250, 350, 1400])},
            ]
        )
        keys = {"light_key": of(components), "heavy_key": of(components)}
        recoveries = {"light_key_recovery": of([0.5, 0.9999]), "heavy_key_recovery": of([0.5, 0.9999])}
        pressed = {"inlet": inlet, "outlet": f"a{i}", "outlet_P_bar": of([1, 20, 490])}
        split = {
            "type": "flash",
            "inlet": inlet,
            "vapor": f"a{i}",
            "liquid": f"b{i}",
            "P_bar": of([0.01, 2, 200]),
        }
        column = {
            "type": "column",
            "inlet": inlet,
            "distillate": f"a{i}",
            "bottoms": f"b{i}",
            "P_bar": of([1, 20]),
        }
        units[f"u{i}"] = of(
            [
                split | setting,
                column | keys | recoveries,
                pressed | {"type": "pump"},
                pressed | {"type": "compressor"},
            ]
        )
        inlet = f"a{i}" if "outlet" in units[f"u{i}"] else of([f"a{i}", f"b{i}"])
    one = feed(of([1e-3, 10, 1e5]), of([150, 300, 600]), of([0.5, 5, 100]), share)
    package = of(["peng_robinson", "ideal", "unifac"])
    return {"package": package, "components": components, "feeds": {"feed": one}, "units": units}


def test_every_flowsheet_gives_finite_numbers_or_an_error() -> None:
    chance = random.Random(7)
    outcomes: Counter[str] = Counter()
    for _ in range(400):
        try:
            json.dumps(Flowsheet.read(random_flowsheet(chance)).solve(), allow_nan=False)
            outcomes["converged"] += 1
        except SimulationError as error:
            outcomes[error.code] += 1
    assert outcomes["converged"] > 10
    assert outcomes["not_converged"] > 10
    assert outcomes["unit_not_applicable"] > 10


# the service


@pytest.fixture(scope="module")
def service() -> Iterator[httpx2.Client]:
    """Client of the simulator in a separate process."""
    with simulator() as url, httpx2.Client(base_url=url, timeout=60) as client:
        yield client


def test_the_schema_example_runs_over_http(service: httpx2.Client) -> None:
    served = service.get("/schema").json()
    assert served == schema()
    assert set(served["unit_types"]) == {"mixer", "heater", "pump", "flash", "column", "compressor"}
    run = service.post("/simulations", json=served["example"]).json()
    assert (run["status"], run["units"]) == ("converged", ["drum"])
    everything = service.get(f"/simulations/{run['run_id']}").json()
    some = service.get(
        f"/simulations/{run['run_id']}", params=[("path", "streams.gas.T_K"), ("path", "units.drum")]
    ).json()
    assert some == {"streams.gas.T_K": 330.0, "units.drum": everything["units"]["drum"]}


def test_the_service_reports_errors(service: httpx2.Client) -> None:
    example = service.get("/schema").json()["example"]
    assert service.post("/simulations", content="{").json()["error"]["code"] == "bad_flowsheet"
    assert service.post("/simulations", json=[1]).status_code == 422
    assert (
        service.post("/simulations", content=b" " * 300_000).json()["error"]["message"]
        == "the flowsheet is larger than 262144 bytes; send a smaller one"
    )
    unknown = example | {"components": ["propane", "n-pentane", "kryptonite"]}
    assert service.post("/simulations", json=unknown).json()["error"]["code"] == "unknown_component"
    hot = example | {"units": {"drum": example["units"]["drum"] | {"T_K": 9000}}}
    failed = service.post("/simulations", json=hot)
    assert (failed.status_code, failed.json()["status"]) == (200, "failed")
    assert failed.json()["error"]["unit"] == "drum"
    gone = service.get(f"/simulations/{failed.json()['run_id']}")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "unknown_result")
    good = service.post("/simulations", json=example).json()["run_id"]
    path = service.get(f"/simulations/{good}", params={"path": "streams.oil.colour"})
    assert "streams.oil has T_K, P_bar" in path.json()["error"]["message"]
    assert service.get("/simulations/run-none").status_code == 404


@pytest.mark.parametrize(
    "composition",
    [
        {"propane": 1e308, "n-pentane": 1e308},
        {"propane": 1e-320, "n-pentane": 1},
        {"propane": 1, "\ud800": 1},
        {"propane": 1, "": 0},
        {"propane": -1, "n-pentane": 2},
        {"propane": 0},
        {"propane": "much"},
        {"x" * 100_000: 1},
        {"\u6c34": 1},
        {},
        [],
        None,
    ],
)
def test_no_composition_breaks_the_service(composition: Any, service: httpx2.Client) -> None:
    """A service that fails would end the run."""
    example = service.get("/schema").json()["example"]
    example["feeds"]["feed"]["composition"] = composition
    for components in (example["components"], list(composition or [])):
        answer = service.post("/simulations", content=json.dumps(example | {"components": components}))
        assert answer.status_code in (200, 422)
        assert len(answer.content) < 5000


def test_concurrent_simulations_do_not_mix(service: httpx2.Client) -> None:
    """Each result belongs to its flowsheet, even with concurrent requests."""
    example = service.get("/schema").json()["example"]

    def gas(T: float) -> dict[str, Any]:
        units = {"drum": example["units"]["drum"] | {"T_K": T}}
        run_id = service.post("/simulations", json=example | {"units": units}).json()["run_id"]
        return service.get(f"/simulations/{run_id}").json()["streams"]["gas"]

    temperatures = [310.0 + 2 * i for i in range(16)]
    one_by_one = [gas(T) for T in temperatures]
    assert len({stream["flow_kmol_h"] for stream in one_by_one}) == len(temperatures)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(gas, temperatures * 3)) == one_by_one * 3


def test_a_simulator_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMULATOR_URL", "http://127.0.0.1:9")
    with (
        pytest.raises(SimulatorUnavailableError, match="no simulator responds at SIMULATOR_URL=http://127"),
        simulator(),
    ):
        pass


DIES = """
import os, psutil
from examples.process_agent.flowsheets.local import simulator
with simulator() as url:
    print(psutil.Process().children()[0].pid, flush=True)
    os.kill(os.getpid(), 9)
"""


def test_a_simulator_ends_with_its_parent() -> None:
    """The simulator also ends if its parent process is killed."""
    killed = subprocess.run(
        [sys.executable, "-c", DIES],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert killed.returncode == -9
    with contextlib.suppress(psutil.NoSuchProcess):  # it has already ended
        psutil.Process(int(killed.stdout)).wait(20)
