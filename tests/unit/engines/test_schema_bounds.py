"""Bounds of schemas that constrain answers."""

import json
from typing import Any

import pytest

from raylight.engines.grammar import MAX_SCHEMA, find_pattern_problem, find_schema_problem


def properties(count: int, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(count)}} | more


def nested(schema: Any, depth: int) -> Any:
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {},
        True,
        nested({"type": "string"}, 90),
        properties(1000),
        properties(100, minProperties=3),
        {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}T\d{2}:\d{2}$", "maxLength": 10**9},
        {"properties": {"pattern": {"type": "string"}, "minProperties": {"type": "integer"}}},
        {"pattern": 3, "patternProperties": 3, "properties": [1]},
    ],
)
def test_usual_schemas_pass(schema: Any) -> None:
    assert find_schema_problem(schema, len(json.dumps(schema))) is None


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        (properties(1001), "at properties: 1001 properties; at most 1000 are allowed"),
        (
            nested(properties(101, maxProperties=5), 1),
            "at properties.a.properties: 101 properties; at most 100 are allowed together with "
            "minProperties and maxProperties",
        ),
        (
            {"anyOf": [{}, {"pattern": "(a{1,1000}){1,1000}"}]},
            "at anyOf.1.pattern: its counts multiply to 1000000; at most 100000 are allowed",
        ),
        ({"patternProperties": {"a" * 1001: {}}}, "at pattern: 1001 characters; at most 1000 are allowed"),
        (
            {"const": "x" * MAX_SCHEMA},
            f"it has {MAX_SCHEMA + 13} characters of JSON; at most {MAX_SCHEMA} are allowed",
        ),
    ],
)
def test_an_expensive_schema_is_named_with_its_place(schema: Any, problem: str) -> None:
    assert find_schema_problem(schema, len(json.dumps(schema))) == problem


def test_counts_of_any_length_are_read() -> None:
    assert find_pattern_problem("a{0,}b{3}c{,4}{x}") is None
    assert find_pattern_problem("a{" + "9" * 900 + "}") == f"the count {'9' * 20} is above 1000"
    assert find_pattern_problem("a{0,10000}") == "the count 10000 is above 1000"
    assert find_pattern_problem("a{0001000}") is None
