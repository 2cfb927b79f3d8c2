"""Function calls of the Berkeley Function-Calling Leaderboard: tools, and the comparison with its answers.

The rules follow its AST check of Python: one call of the right function, all required arguments, each
of the declared type and equal to one of the possible values. Strings are compared without case, spaces and
punctuation. An argument may be left out if "" is one of its possible values.
"""

from __future__ import annotations

import json
import re
from typing import Any

from raylight.types import JsonObject

Schema = JsonObject

JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": "string"}
"""Types of JSON Schema for the names of types that the data set has."""
PYTHON_TYPES = {
    "string": str,
    "integer": int,
    "float": float,
    "boolean": bool,
    "array": list,
    "tuple": list,
    "dict": dict,
    "any": str,
}
IGNORED = re.compile(r"[ ,./\-_*^]")


def tools_of(row: JsonObject) -> list[Schema]:
    """Return the functions of a row as tools in OpenAI's form, whose names have no dots."""
    return [
        {
            "type": "function",
            "function": {
                "name": _tool_name(function["name"]),
                "description": function["description"],
                "parameters": _json_schema(function["parameters"]),
            },
        }
        for function in row["function"]
    ]


def score_call(row: JsonObject, message: Any) -> float:
    """Return 1 if a message makes the expected call and no other, else 0."""
    calls = message.tool_calls or []
    ((name, possible),) = row["ground_truth"][0].items()
    if len(calls) != 1 or calls[0].function.name != _tool_name(name):
        return 0.0
    try:
        given = json.loads(calls[0].function.arguments)
    except json.JSONDecodeError:
        return 0.0
    return float(isinstance(given, dict) and _fits(given, row["function"][0]["parameters"], possible))


def _tool_name(name: str) -> str:
    return name.replace(".", "_")


def _json_schema(schema: object) -> object:
    """Return a schema with JSON Schema's names of types, at every depth."""
    if isinstance(schema, list):
        return [_json_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: JSON_TYPES.get(value, value) if key == "type" and isinstance(value, str) else _json_schema(value)
        for key, value in schema.items()
    }


def _fits(given: JsonObject, parameters: Schema, possible: dict[str, list[object]]) -> bool:
    properties = parameters["properties"]
    return (
        all(name in given for name in parameters["required"])
        and all(name in properties and name in possible for name in given)
        and all(name in given or "" in values for name, values in possible.items())
        and all(_is_possible(value, properties[name], possible[name]) for name, value in given.items())
    )


def _is_possible(value: Any, declared: Schema, possible: list[Any]) -> bool:
    """Return True if an argument has the declared type and one of the possible values.

    A value of another type than the declared one is the name of a variable, where the possible values have
    that type too. An array that may be left out may be empty, and the types of its elements are not compared.
    """
    expected: object = PYTHON_TYPES[declared["type"]]
    if expected is float and type(value) is int:
        value = float(value)
    of_possible = next((type(other) for other in possible if other != ""), None)
    if type(value) is not expected:
        return type(value) is of_possible and value in possible
    if of_possible not in (None, expected):
        return value in possible
    if expected is dict:
        return any(other != "" and _same_entries(value, other) for other in possible)
    if expected is not list:
        return _plain(value) in map(_plain, possible)
    may_be_left_out = "" in possible
    lists = [other or [] for other in possible if other == "" or isinstance(other, list)]
    inner = PYTHON_TYPES[declared["items"]["type"]]
    if inner is dict:
        return any(
            len(other) == len(value)
            and all(isinstance(a, dict) and _same_entries(a, b) for a, b in zip(value, other, strict=True))
            for other in lists
        )
    return any(
        list(map(_plain, value)) == list(map(_plain, other))
        and (may_be_left_out or all(type(part) in (inner, type(other[0])) for part in value))
        for other in lists
    )


def _same_entries(given: JsonObject, possible: dict[str, list[object]]) -> bool:
    """Return True if each entry has one of the possible values, and those left out may be left out."""
    return all(
        name in possible and _plain(value) in map(_plain, possible[name]) for name, value in given.items()
    ) and all(name in given or "" in values for name, values in possible.items())


def _plain(value: object) -> object:
    """Return a string without case and punctuation; another value unchanged."""
    return IGNORED.sub("", value).lower().replace("'", '"') if isinstance(value, str) else value
