"""Types of values that are written as text, for schemas as pydantic writes them."""

import enum
import json
from typing import Any, Literal, Optional

import pytest
from pydantic import BaseModel, Field

from raylight.engines.transformers.schema_values import typed_value


class Color(enum.Enum):
    RED = "red"
    TWO = "2"


class Point(BaseModel):
    x: int


class Arguments(BaseModel):
    text: str
    maybe: Optional[str] = None  # noqa: UP045 (as people write it)
    count: int | None = None
    share: float = 0.5
    flag: bool = False
    either: int | str = 0
    color: Color = Color.RED
    kind: Literal["a", "1"] = "a"
    level: Literal[1, 2] = 1
    only: Literal["x"] = "x"
    point: Point | None = None
    points: list[Point] = Field(default=[], description="a list")
    names: list[str] | None = None
    mapping: dict[str, int] = {}
    anything: Any = None


SCHEMA = Arguments.model_json_schema()


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "12345", "12345"),
        ("text", "true", "true"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("maybe", "12345", "12345"),
        ("maybe", "true", "true"),
        ("maybe", '{"a": 1}', '{"a": 1}'),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("count", "7", 7),
        ("count", "7.0", 7),
        ("count", "null", None),
        ("count", "seven", "seven"),
        ("share", "7", 7),
        ("share", "0.25", 0.25),
        ("flag", "true", True),
        ("flag", "True", True),
        ("flag", "False", False),
        ("either", "5", "5"),
        ("color", "2", "2"),
        ("kind", "1", "1"),
        ("level", "2", 2),
        ("level", "3", "3"),
        ("only", "x", "x"),
        ("point", '{"x": 1}', {"x": 1}),
        ("point", "{'x': 1}", {"x": 1}),
        ("point", "null", None),
        ("points", '[{"x": 1}]', [{"x": 1}]),
        ("names", '["a", "1"]', ["a", "1"]),
        ("names", "a", "a"),
        ("mapping", '{"a": 1}', {"a": 1}),
        ("mapping", "{", "{"),
        ("anything", "1", 1),
        ("anything", "a", "a"),
        ("anything", "NaN", "NaN"),
        ("unknown", "[1]", [1]),
    ],
)
def test_values(name: str, text: str, value: Any) -> None:
    found = typed_value(text, SCHEMA["properties"].get(name), SCHEMA)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["string", "null"]}, "5", "5"),
        ({"type": ["integer", "null"]}, "5", 5),
        ({"allOf": [{"$ref": "#/$defs/Color"}]}, "2", "2"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "5", "5"),
        ({"const": 1}, "1", 1),
        ({"const": True}, "1", "1"),
        ({"enum": [1.0, None]}, "1", 1.0),
        ({"enum": ["red", None]}, "blue", "blue"),
        ({"enum": ["red", None]}, "null", None),
        ({"$ref": "#/$defs/Nowhere"}, "5", 5),
        ({"$ref": "http://elsewhere"}, "5", 5),
        ({"$ref": "#/$defs/Loop"}, "5", 5),
        ({"type": 3, "anyOf": "no list", "enum": "no list"}, "5", 5),
        ("no schema", "5", 5),
        ({"type": "number"}, "1e999", "1e999"),
        ({"type": "array"}, "[1e999, 'a']", "[1e999, 'a']"),
        ({"type": "string"}, "[" * 100_000, "[" * 100_000),
        ({"type": "array"}, "[" * 100_000, "[" * 100_000),
    ],
)
def test_other_schemas(schema: Any, text: str, value: Any) -> None:
    root = {"$defs": SCHEMA["$defs"] | {"Loop": {"$ref": "#/$defs/Loop"}}}
    found = typed_value(text, schema, root)
    assert (found, type(found)) == (value, type(value))


def test_all_values_of_a_call_pass_the_tools_own_validation() -> None:
    given = {
        "text": "1",
        "maybe": "2",
        "count": "3",
        "flag": "True",
        "color": "2",
        "level": "1",
        "names": '["3"]',
    }
    values = {name: typed_value(text, SCHEMA["properties"][name], SCHEMA) for name, text in given.items()}
    assert Arguments.model_validate_json(json.dumps(values), strict=True).maybe == "2"
