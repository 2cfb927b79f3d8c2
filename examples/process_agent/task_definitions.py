"""Design tasks, each with a reference flowsheet from which its questions and target numbers are computed.

In a text, `<streams.gas.T_K .1f>` is replaced by that number of the solved reference, in that format.
"""

from __future__ import annotations

from typing import Any

LIGHT = {"methane": 0.35, "ethane": 0.2, "propane": 0.25, "n-butane": 0.2}
LPG = {"propane": 0.3, "n-butane": 0.3, "n-pentane": 0.2, "n-hexane": 0.2}
AROMATIC = {"benzene": 0.45, "toluene": 0.35, "p-xylene": 0.2}


def feed(flow: float, T: float, P: float, composition: dict[str, float]) -> dict[str, Any]:
    """Return a feed of a flowsheet, in kmol/h, K, bar, mole fractions."""
    return {"flow_kmol_h": flow, "T_K": T, "P_bar": P, "composition": composition}


def flowsheet(feeds: dict[str, Any], units: dict[str, Any], package: str = "peng_robinson") -> dict[str, Any]:
    """Return a flowsheet with the components of its feeds."""
    components = list(dict.fromkeys(name for one in feeds.values() for name in one["composition"]))
    return {"package": package, "components": components, "feeds": feeds, "units": units}


def heater(inlet: str, outlet: str, **settings: Any) -> dict[str, Any]:
    return {"type": "heater", "inlet": inlet, "outlet": outlet, **settings}


def pump(inlet: str, outlet: str, P: float, efficiency: float = 0.75) -> dict[str, Any]:
    return {"type": "pump", "inlet": inlet, "outlet": outlet, "outlet_P_bar": P, "efficiency": efficiency}


def compressor(inlet: str, outlet: str, P: float, efficiency: float = 0.75) -> dict[str, Any]:
    return {
        "type": "compressor",
        "inlet": inlet,
        "outlet": outlet,
        "outlet_P_bar": P,
        "efficiency": efficiency,
    }


def drum(inlet: str, vapor: str, liquid: str, **settings: Any) -> dict[str, Any]:
    return {"type": "flash", "inlet": inlet, "vapor": vapor, "liquid": liquid, **settings}


def mixer(*inlets: str, outlet: str) -> dict[str, Any]:
    return {"type": "mixer", "inlets": list(inlets), "outlet": outlet}


def column(
    inlet: str, keys: tuple[str, str], recoveries: tuple[float, float], reflux_factor: float = 1.3
) -> dict[str, Any]:
    return {
        "type": "column",
        "inlet": inlet,
        "distillate": "distillate",
        "bottoms": "bottoms",
        "light_key": keys[0],
        "heavy_key": keys[1],
        "light_key_recovery": recoveries[0],
        "heavy_key_recovery": recoveries[1],
        "reflux_factor": reflux_factor,
    }


TRAIN: list[dict[str, Any]] = [
    {
        "id": "train-easy-heater",
        "difficulty": "easy",
        "reference": flowsheet(
            {"feed": feed(100, 290, 8, LPG)}, {"heater": heater("feed", "hot", outlet_T_K=350)}
        ),
        "text": "Heat the feed to 350 K without loss of pressure, in a unit named `heater` whose outlet is "
        "`hot`.",
        "specs": ["streams.hot.T_K", "streams.hot.P_bar"],
        "asked": {"duty_kW": "units.heater.duty_kW", "vapor_fraction": "streams.hot.vapor_fraction"},
    },
    {
        "id": "train-easy-pump",
        "difficulty": "easy",
        "reference": flowsheet(
            {"feed": feed(180, 300, 1.5, {"n-hexane": 1.0})}, {"pump": pump("feed", "high", 20, 0.7)}
        ),
        "text": "Pump the feed to 20 bar in a unit named `pump` of efficiency 0.7; its outlet is `high`.",
        "specs": ["streams.high.P_bar", "units.pump.work_kW"],
        "asked": {"work_kW": "units.pump.work_kW", "outlet_T_K": "streams.high.T_K"},
    },
    {
        "id": "train-easy-flash",
        "difficulty": "easy",
        "reference": flowsheet(
            {"feed": feed(60, 280, 20, LIGHT)}, {"drum": drum("feed", "gas", "oil", T_K=265, P_bar=15)}
        ),
        "text": "Flash the feed at 265 K and 15 bar in a unit named `drum`, into the vapour `gas` and the "
        "liquid `oil`.",
        "specs": ["streams.gas.T_K", "streams.gas.P_bar", "streams.oil.flow_kmol_h"],
        "asked": {
            "gas_kmol_h": "streams.gas.flow_kmol_h",
            "methane_in_gas": "streams.gas.composition.methane",
        },
    },
    {
        "id": "train-medium-mix-flash",
        "difficulty": "medium",
        "reference": flowsheet(
            {
                "lean": feed(80, 300, 6, {"propane": 0.7, "n-butane": 0.3}),
                "rich": feed(40, 330, 6, {"n-butane": 0.4, "n-pentane": 0.6}),
            },
            {
                "mixer": mixer("lean", "rich", outlet="mixed"),
                "drum": drum("mixed", "gas", "oil", T_K=315, P_bar=5),
            },
        ),
        "text": (
            "Mix the two feeds in `mixer` (outlet `mixed`) and flash the mixture at 315 K and 5 bar in "
            "`drum`, into `gas` and `oil`."
        ),
        "specs": ["streams.mixed.flow_kmol_h", "streams.gas.T_K", "streams.gas.P_bar"],
        "asked": {
            "mixed_T_K": "streams.mixed.T_K",
            "gas_kmol_h": "streams.gas.flow_kmol_h",
            "drum_duty_kW": "units.drum.duty_kW",
        },
    },
    {
        "id": "train-medium-pump-vaporise",
        "difficulty": "medium",
        "reference": flowsheet(
            {"feed": feed(120, 300, 1.2, {"benzene": 0.5, "toluene": 0.5})},
            {
                "pump": pump("feed", "high", 6),
                "boiler": heater("high", "steam", outlet_vapor_fraction=1.0, pressure_drop_bar=0.5),
            },
            "ideal",
        ),
        "text": (
            "Pump the feed to 6 bar in `pump` (efficiency 0.75, outlet `high`) and vaporise it just "
            "completely, to its dew point, in `boiler` (outlet `steam`), which loses 0.5 bar."
        ),
        "specs": ["streams.high.P_bar", "streams.steam.P_bar", "streams.steam.vapor_fraction"],
        "asked": {
            "work_kW": "units.pump.work_kW",
            "duty_kW": "units.boiler.duty_kW",
            "steam_T_K": "streams.steam.T_K",
        },
    },
    {
        "id": "train-medium-flash-temperature",
        "difficulty": "medium",
        "reference": flowsheet(
            {"feed": feed(90, 310, 12, LPG)}, {"drum": drum("feed", "gas", "oil", T_K=371, P_bar=10)}
        ),
        "text": (
            "Flash the feed at 10 bar in `drum`, into `gas` and `oil`, at the temperature at which `gas` is "
            "<streams.gas.flow_kmol_h .2f> kmol/h."
        ),
        "specs": ["streams.gas.flow_kmol_h", "streams.gas.P_bar"],
        "asked": {"drum_T_K": "units.drum.T_K", "duty_kW": "units.drum.duty_kW"},
        "search": True,
    },
    {
        "id": "train-medium-compress-condense",
        "difficulty": "medium",
        "reference": flowsheet(
            {"feed": feed(50, 300, 1.5, {"propane": 0.8, "isobutane": 0.2})},
            {
                "compressor": compressor("feed", "hot", 12, 0.78),
                "condenser": heater("hot", "liquid", outlet_vapor_fraction=0.0),
            },
        ),
        "text": (
            "Compress the feed to 12 bar in `compressor` (isentropic efficiency 0.78, outlet `hot`) and "
            "condense it just completely, to its bubble point, in `condenser` (outlet `liquid`)."
        ),
        "specs": ["streams.hot.P_bar", "units.compressor.work_kW", "streams.liquid.vapor_fraction"],
        "asked": {
            "work_kW": "units.compressor.work_kW",
            "duty_kW": "units.condenser.duty_kW",
            "liquid_T_K": "streams.liquid.T_K",
        },
    },
    {
        "id": "train-hard-depropaniser",
        "difficulty": "hard",
        "reference": flowsheet(
            {"feed": feed(100, 290, 5, LPG)},
            {
                "pump": pump("feed", "high", 17),
                "preheater": heater("high", "hot", outlet_vapor_fraction=0.0),
                "column": column("hot", ("propane", "n-butane"), (0.98, 0.97), 1.36),
            },
        ),
        "text": (
            "Pump the feed to 17 bar in `pump` (efficiency 0.75, outlet `high`), heat it to its bubble "
            "point in `preheater` (outlet `hot`) and distil it in `column` into `distillate` and `bottoms`: "
            "98% of the propane goes to the distillate, 97% of the n-butane to the bottoms. Choose the "
            "reflux so that the column has <units.column.stages .2f> stages."
        ),
        "specs": [
            "streams.high.P_bar",
            "streams.hot.vapor_fraction",
            "units.column.min_stages",
            "units.column.stages",
        ],
        "asked": {"reflux": "units.column.reflux", "reboiler_duty_kW": "units.column.reboiler_duty_kW"},
        "search": True,
    },
    {
        "id": "train-hard-two-stages",
        "difficulty": "hard",
        "reference": flowsheet(
            {"feed": feed(150, 305, 2, {"methane": 0.6, "ethane": 0.25, "propane": 0.15})},
            {
                "first": compressor("feed", "warm", 5.8),
                "cooler": heater("warm", "cool", outlet_T_K=310, pressure_drop_bar=0.2),
                "second": compressor("cool", "high", 16),
            },
        ),
        "text": (
            "Compress the feed to 16 bar in two stages with a cooler between them: `first` (outlet `warm`), "
            "`cooler` (to 310 K, losing 0.2 bar, outlet `cool`), `second` (outlet `high`), both stages with "
            "an isentropic efficiency of 0.75. Choose the pressure between them so that `warm` has "
            "<streams.warm.T_K .2f> K."
        ),
        "specs": [
            "streams.warm.T_K",
            "streams.warm.P_bar",
            "streams.cool.T_K",
            "streams.high.P_bar",
            "units.second.work_kW",
        ],
        "asked": {
            "between_P_bar": "streams.warm.P_bar",
            "first_work_kW": "units.first.work_kW",
            "second_work_kW": "units.second.work_kW",
        },
        "search": True,
    },
    {
        "id": "train-hard-flash-column",
        "difficulty": "hard",
        "reference": flowsheet(
            {
                "fresh": feed(70, 300, 10, AROMATIC),
                "recycled": feed(30, 340, 10, {"toluene": 0.6, "p-xylene": 0.4}),
            },
            {
                "mixer": mixer("fresh", "recycled", outlet="mixed"),
                "heater": heater("mixed", "hot", outlet_T_K=412),
                "drum": drum("hot", "light", "heavy", duty_kW=0, P_bar=2.0),
                "column": column("heavy", ("benzene", "toluene"), (0.97, 0.96)),
            },
        ),
        "text": (
            "Mix the feeds in `mixer` (outlet `mixed`), heat the mixture at 10 bar in `heater` (outlet "
            "`hot`), flash it without heat at 2 bar in `drum` into `light` and `heavy`, and distil `heavy` "
            "in `column` into `distillate` and `bottoms`: 97% of its benzene goes to the distillate, 96% of "
            "its toluene to the bottoms, at 1.3 times the minimum reflux. Choose the temperature of `hot` "
            "so that `light` is <streams.light.flow_kmol_h .2f> kmol/h."
        ),
        "specs": [
            "streams.light.flow_kmol_h",
            "streams.light.P_bar",
            "units.column.min_stages",
            "units.column.stages",
        ],
        "asked": {
            "hot_T_K": "streams.hot.T_K",
            "heater_duty_kW": "units.heater.duty_kW",
            "condenser_duty_kW": "units.column.condenser_duty_kW",
        },
        "search": True,
    },
]

VALIDATION: list[dict[str, Any]] = [
    {
        "id": "val-easy-cooler",
        "difficulty": "easy",
        "reference": flowsheet(
            {"feed": feed(75, 390, 3, {"n-pentane": 0.5, "n-heptane": 0.5})},
            {"cooler": heater("feed", "cold", outlet_T_K=330)},
        ),
        "text": "Cool the feed to 330 K at its pressure in a unit named `cooler`; its outlet is `cold`.",
        "specs": ["streams.cold.T_K", "streams.cold.P_bar"],
        "asked": {"duty_kW": "units.cooler.duty_kW", "vapor_fraction": "streams.cold.vapor_fraction"},
    },
    {
        "id": "val-easy-ethanol-flash",
        "difficulty": "easy",
        "reference": flowsheet(
            {"feed": feed(40, 330, 1.1, {"ethanol": 0.25, "water": 0.75})},
            {"drum": drum("feed", "vapour", "liquid", vapor_fraction=0.3, P_bar=1.0)},
            "unifac",
        ),
        "text": "Flash the feed at 1 bar in a unit named `drum` so that 30% of it is vapour; the outlets: "
        "`vapour` and `liquid`.",
        "specs": ["streams.vapour.flow_kmol_h", "streams.vapour.P_bar"],
        "asked": {
            "drum_T_K": "units.drum.T_K",
            "duty_kW": "units.drum.duty_kW",
            "ethanol_in_vapour": "streams.vapour.composition.ethanol",
        },
    },
    {
        "id": "val-medium-flash-compress",
        "difficulty": "medium",
        "reference": flowsheet(
            {"feed": feed(110, 300, 25, LIGHT)},
            {
                "drum": drum("feed", "gas", "oil", duty_kW=0, P_bar=8),
                "compressor": compressor("gas", "export", 30),
            },
        ),
        "text": (
            "Let the feed down to 8 bar without heat in `drum`, into `gas` and `oil`, and compress `gas` to "
            "30 bar in `compressor` (isentropic efficiency 0.75, outlet `export`)."
        ),
        "specs": ["streams.gas.P_bar", "units.drum.T_K", "streams.export.P_bar", "units.compressor.work_kW"],
        "asked": {
            "drum_T_K": "units.drum.T_K",
            "work_kW": "units.compressor.work_kW",
            "export_T_K": "streams.export.T_K",
        },
    },
    {
        "id": "val-medium-heater-duty",
        "difficulty": "medium",
        "reference": flowsheet(
            {"feed": feed(65, 300, 4, {"n-butane": 0.4, "n-hexane": 0.6})},
            {"heater": heater("feed", "hot", duty_kW=520), "drum": drum("hot", "gas", "oil", duty_kW=0)},
        ),
        "text": (
            "Heat the feed at 4 bar in `heater` (outlet `hot`) and separate it without more heat in `drum` "
            "into `gas` and `oil`. Choose the duty of the heater so that `gas` holds "
            "<streams.gas.composition.n-butane .4f> mole fraction of n-butane."
        ),
        "specs": ["streams.gas.composition.n-butane", "streams.gas.P_bar"],
        "asked": {"duty_kW": "units.heater.duty_kW", "gas_kmol_h": "streams.gas.flow_kmol_h"},
        "search": True,
    },
    {
        "id": "val-hard-methanol",
        "difficulty": "hard",
        "reference": flowsheet(
            {"feed": feed(85, 300, 1.5, {"methanol": 0.4, "water": 0.6})},
            {
                "preheater": heater("feed", "hot", duty_kW=300),
                "column": column("hot", ("methanol", "water"), (0.99, 0.985), 1.5),
            },
            "unifac",
        ),
        "text": (
            "Heat the feed by 300 kW in `preheater` (outlet `hot`) and distil it in `column` into "
            "`distillate` and `bottoms`: 99% of the methanol goes to the distillate, 98.5% of the water to "
            "the bottoms. Choose the reflux so that the reboiler takes <units.column.reboiler_duty_kW .1f> "
            "kW."
        ),
        "specs": ["units.preheater.duty_kW", "units.column.min_stages", "units.column.reboiler_duty_kW"],
        "asked": {"reflux": "units.column.reflux", "stages": "units.column.stages"},
        "search": True,
    },
]

TEST: list[dict[str, Any]] = [
    {
        "id": "test-easy-compressor",
        "difficulty": "easy",
        "reference": flowsheet(
            {"feed": feed(200, 310, 5, {"nitrogen": 0.7, "carbon dioxide": 0.3})},
            {"compressor": compressor("feed", "high", 14, 0.8)},
        ),
        "text": "Compress the feed to 14 bar in a unit named `compressor` of isentropic efficiency 0.8; its "
        "outlet is `high`.",
        "specs": ["streams.high.P_bar", "units.compressor.work_kW"],
        "asked": {"work_kW": "units.compressor.work_kW", "outlet_T_K": "streams.high.T_K"},
    },
    {
        "id": "test-medium-adiabatic-mix",
        "difficulty": "medium",
        "reference": flowsheet(
            {
                "cold": feed(55, 285, 4, {"acetone": 0.6, "water": 0.4}),
                "hot": feed(35, 400, 3, {"acetone": 0.2, "water": 0.8}),
            },
            {
                "mixer": mixer("cold", "hot", outlet="mixed"),
                "drum": drum("mixed", "gas", "liquid", duty_kW=150, P_bar=1.2),
            },
            "unifac",
        ),
        "text": (
            "Mix the feeds in `mixer` (outlet `mixed`) and flash the mixture at 1.2 bar with a duty of 150 "
            "kW in `drum`, into `gas` and `liquid`."
        ),
        "specs": ["streams.mixed.flow_kmol_h", "units.drum.duty_kW", "streams.gas.P_bar"],
        "asked": {
            "mixed_T_K": "streams.mixed.T_K",
            "gas_kmol_h": "streams.gas.flow_kmol_h",
            "acetone_in_gas": "streams.gas.composition.acetone",
        },
    },
    {
        "id": "test-hard-debutaniser",
        "difficulty": "hard",
        "reference": flowsheet(
            {"feed": feed(130, 295, 4, {"n-butane": 0.35, "n-pentane": 0.4, "n-hexane": 0.25})},
            {
                "pump": pump("feed", "high", 9),
                "preheater": heater("high", "hot", duty_kW=560),
                "column": column("hot", ("n-butane", "n-pentane"), (0.985, 0.98), 1.25),
            },
        ),
        "text": (
            "Pump the feed to 9 bar in `pump` (efficiency 0.75, outlet `high`), heat it in `preheater` "
            "(outlet `hot`) and distil it in `column` into `distillate` and `bottoms`: 98.5% of the "
            "n-butane goes to the distillate, 98% of the n-pentane to the bottoms, at 1.25 times the "
            "minimum reflux. Choose the duty of the preheater so that the reboiler takes "
            "<units.column.reboiler_duty_kW .1f> kW."
        ),
        "specs": ["streams.high.P_bar", "units.column.min_stages", "units.column.reboiler_duty_kW"],
        "asked": {"duty_kW": "units.preheater.duty_kW", "reflux": "units.column.reflux"},
        "search": True,
    },
]
