"""Function calls on real rows of the leaderboard (samples/README.md).

A run of the leaderboard's own checker (bfcl-eval 2026.3.23) on 10,500 calls, right ones and changed ones of
all 400 rows, gave the same verdicts.
"""

import json
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from raylight.benchmarks.catalogue import BENCHMARKS
from raylight.benchmarks.data_sets import read_rows
from raylight.benchmarks.function_calls import score_call, tools_of

from .test_answers import SAMPLES

ROWS = {row["id"]: row for row in read_rows(BENCHMARKS["bfcl"], str(SAMPLES / "bfcl"))}


def calling(*calls: tuple[str, Any]) -> Any:
    made = [
        SimpleNamespace(
            function=SimpleNamespace(
                name=name, arguments=given if isinstance(given, str) else json.dumps(given)
            )
        )
        for name, given in calls
    ]
    return SimpleNamespace(content=None, tool_calls=made or None)


def test_tools_are_json_schemas() -> None:
    for row in ROWS.values():
        (tool,) = tools_of(row)
        jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])
        assert tool["function"]["parameters"]["type"] == "object"
    assert tools_of(ROWS["simple_1"])[0]["function"]["name"] == "math_factorial"


AREA = "calculate_triangle_area"
CURVE = {"function": "x**2", "interval": [1, 3]}
FETCH = {"database_name": "StudentDB", "table_name": "students"}


@pytest.mark.parametrize(
    ("row", "calls", "score"),
    [
        (0, [(AREA, {"base": 10, "height": 5})], 1.0),
        (0, [(AREA, {"base": 10, "height": 5, "unit": "Units"})], 1.0),
        (0, [(AREA, {"base": 10.0, "height": 5})], 0.0),
        (0, [(AREA, {"base": "10", "height": 5})], 0.0),
        (0, [(AREA, {"base": 10})], 0.0),
        (0, [(AREA, {"base": 10, "height": 5, "depth": 1})], 0.0),
        (0, [(AREA, {"base": 10, "height": 5})] * 2, 0.0),
        (0, [("area", {"base": 10, "height": 5})], 0.0),
        (0, [(AREA, '{"base": 10')], 0.0),
        (0, [(AREA, "[10, 5]")], 0.0),
        (0, [], 0.0),
        (1, [("math_factorial", {"number": 5})], 1.0),
        (13, [("calculate_area_under_curve", CURVE)], 0.0),
        (13, [("calculate_area_under_curve", CURVE | {"interval": [1.0, 3.0]})], 1.0),
        (13, [("calculate_area_under_curve", CURVE | {"interval": [1.0, 2.0]})], 0.0),
        (14, [("calculate_derivative", {"function": "3x**2 + 2x - 1", "x_value": 0})], 1.0),
        (14, [("calculate_derivative", {"function": "3x^2"})], 0.0),
        (89, [("db_fetch_records", FETCH | {"conditions": {"department": "Science"}})], 0.0),
        (
            89,
            [
                (
                    "db_fetch_records",
                    FETCH | {"conditions": {"department": "science", "school": "Bluebird HS"}},
                )
            ],
            1.0,
        ),
    ],
)
def test_a_call(row: int, calls: list[tuple[str, Any]], score: float) -> None:
    assert score_call(ROWS[f"simple_{row}"], calling(*calls)) == score


@pytest.mark.parametrize(
    ("arguments", "score"),
    [
        ({"details": ["Plaintiffs", "charges"], "cards": {"Alex": ["A of spades"]}}, 1.0),
        ({"details": [], "cards": {"Alex": ["A of spades"]}}, 1.0),
        ({"details": ["plaintiffs"], "cards": {"Alex": ["A of spades"]}}, 0.0),
        ({"cards": {"Alex": ["A OF SPADES"]}}, 0.0),
        ({"cards": {"Alex": []}}, 0.0),
    ],
)
def test_an_optional_array_may_be_empty_and_arrays_in_dicts_are_exact(
    arguments: dict[str, Any], score: float
) -> None:
    details = {"type": "array", "items": {"type": "string"}}
    parameters = {"properties": {"details": details, "cards": {"type": "dict"}}, "required": ["cards"]}
    possible = {"details": ["", ["plaintiffs", "charges"]], "cards": [{"Alex": [["A of spades"]]}]}
    row = {"function": [{"name": "find", "parameters": parameters}], "ground_truth": [{"find": possible}]}
    assert score_call(row, calling(("find", arguments))) == score
