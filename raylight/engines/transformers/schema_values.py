"""Values of arguments that a model writes as plain text, typed as the schema of their parameter allows."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from raylight.types.json_object import parse_json

ANY = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
PYTHON_WORDS = {"True": True, "False": False, "None": None}
MAX_DEPTH = 16
"""References and alternatives within each other that are followed; deeper ones allow everything."""


def typed_value(text: str, schema: object, root: Mapping[str, object]) -> object:
    """Return the value that a text stands for.

    A text that is null where null is allowed is None. Otherwise the text itself is the value wherever the
    schema allows strings, and where no allowed type fits.

    Args:
        schema: JSON schema of the parameter, as pydantic writes it; anything else allows every type.
        root: schema of all parameters, in which references are resolved.
    """
    types, values = _allowed(schema, root, 0)
    value = _parse(text)
    is_null = text.strip() in ("null", "None")
    if values is not None:
        if text in values or (value is None and not is_null):
            return text
        return next((known for known in values if _is_same(known, value)), text)
    if is_null and "null" in types:
        return None
    if value is None or (types == ANY and text.strip() in PYTHON_WORDS):
        return text
    if types != ANY and "string" in types:
        return text
    if isinstance(value, float) and value.is_integer() and "integer" in types and "number" not in types:
        value = int(value)
    return value if _types_of(value) & types else text


def _is_same(known: object, value: object) -> bool:
    return bool(known == value) and isinstance(known, bool) == isinstance(value, bool)


def _allowed(
    schema: object, root: Mapping[str, object], depth: int
) -> tuple[frozenset[str], list[object] | None]:
    """Return the types that a schema allows, and its values if it lists them."""
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return ANY, None
    if "const" in schema:
        return _types_of(schema["const"]), [schema["const"]]
    if isinstance(listed := schema.get("enum"), list):
        return frozenset().union(*map(_types_of, listed)), listed
    types, values = ANY, None
    named = schema.get("type")
    if isinstance(named, str | list):
        types = frozenset([named] if isinstance(named, str) else map(str, named))
    if isinstance(reference := schema.get("$ref"), str):
        found, values = _allowed(_resolve(reference, root), root, depth + 1)
        types &= found
    for one in _list(schema.get("allOf")):
        found, some = _allowed(one, root, depth + 1)
        types, values = types & found, some if values is None else values
    for name in ("anyOf", "oneOf"):
        if options := [_allowed(one, root, depth + 1) for one in _list(schema.get(name))]:
            types &= frozenset().union(*(found for found, _ in options))
            if all(some is not None or found == {"null"} for found, some in options):
                values = [
                    value for found, some in options for value in (some if some is not None else [None])
                ]
    return types, values


def _resolve(reference: str, root: object) -> object:
    """Return the schema under a reference within a document; None if there is none."""
    if not reference.startswith("#"):
        return None
    for part in reference.removeprefix("#").strip("/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if part:
            root = root.get(key) if isinstance(root, Mapping) else None
    return root


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _types_of(value: object) -> frozenset[str]:
    """Return the types of JSON schema that a value has."""
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    kinds = {float: "number", str: "string", list: "array", dict: "object"}
    return frozenset({kinds.get(type(value), "string")})


def _parse(text: str) -> Any:
    """Read a text as JSON or as a Python literal; None if it is neither."""
    if text.strip() in PYTHON_WORDS:
        return PYTHON_WORDS[text.strip()]
    value = parse_json(text)
    if value is None and text.strip()[:1] in ("[", "{"):
        try:
            value = ast.literal_eval(text.strip())
            json.dumps(value, allow_nan=False)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            return None
    return value
