"""Bounds of JSON schemas that constrain answers, in both engines.

xgrammar compiles most schemas in milliseconds, and a few short ones for minutes. The bounds keep each below
some seconds. They do not hold for a schema that does not constrain an answer, such as that of a tool without
`strict`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MAX_SCHEMA = 2**16
"""Longest schema, in characters of JSON."""
MAX_PROPERTIES = 1_000
"""Most properties of an object."""
MAX_COUNTED_PROPERTIES = 100
"""Most properties of an object that limits their number."""
MAX_PATTERN = 1_000
"""Longest regular expression."""
MAX_COUNT = 1_000
"""Largest count in a regular expression: xgrammar's time grows with its square."""
MAX_REPETITIONS = 100_000
"""Largest product of the counts in a regular expression, because repetitions may be nested."""

_COUNT = re.compile(r"\{(\d+)(?:,(\d*))?\}")
_COUNTS = ("minProperties", "maxProperties")


def find_schema_problem(schema: Any, length: int) -> str | None:
    """Return what makes a schema too expensive as a constraint, and where; None if nothing does.

    Args:
        length: characters of the schema as JSON.
    """
    if length > MAX_SCHEMA:
        return f"it has {length} characters of JSON; at most {MAX_SCHEMA} are allowed"
    for path, value in _objects(schema):
        for name, problem in _problems_of(value):
            return f"at {'.'.join((*path, name))}: {problem}"
    return None


def _objects(schema: Any) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Yield all objects within a schema with their paths."""
    left: list[tuple[tuple[str, ...], Any]] = [((), schema)]
    while left:
        path, value = left.pop()
        if isinstance(value, dict):
            yield path, value
            left += [((*path, name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            left += [((*path, str(index)), inner) for index, inner in enumerate(value)]


def _problems_of(value: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keywords of an object that are beyond bounds, each with the reason."""
    properties, patterns = value.get("properties"), value.get("patternProperties")
    if isinstance(properties, dict):
        counted = any(isinstance(value.get(name), int) for name in _COUNTS)
        most = MAX_COUNTED_PROPERTIES if counted else MAX_PROPERTIES
        if len(properties) > most:
            beside = f" beside {' and '.join(_COUNTS)}" if counted else ""
            yield "properties", f"{len(properties)} properties; at most {most} are allowed{beside}"
    for pattern in [value.get("pattern"), *(patterns if isinstance(patterns, dict) else ())]:
        if isinstance(pattern, str) and (problem := find_pattern_problem(pattern)):
            yield "pattern", problem


def find_pattern_problem(pattern: str) -> str | None:
    """Return what makes a regular expression too expensive; None if nothing does."""
    if len(pattern) > MAX_PATTERN:
        return f"{len(pattern)} characters; at most {MAX_PATTERN} are allowed"
    product = 1
    for low, high in _COUNT.findall(pattern):
        counts = [count.lstrip("0") for count in (low, high)]
        if any(len(count) > 4 or int(count or 0) > MAX_COUNT for count in counts):
            return f"the count {max(counts, key=len):.20} is above {MAX_COUNT}"
        product *= max(int(high or low), 1)
    if product > MAX_REPETITIONS:
        return f"its counts multiply to {product}; at most {MAX_REPETITIONS} are allowed"
    return None
